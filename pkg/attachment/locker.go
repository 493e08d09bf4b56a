// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"time"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Locker selects how to take locks.
type Locker int

const (
	// Waiting waits for a lock. All verbs but STATUS use it.
	Waiting Locker = iota

	// Trying never waits. STATUS uses it: the next STATUS repairs what the lock's holder does not.
	Trying
)

// ReportRepair logs the error of a repair in GC (Waiting) or STATUS (Trying). This error does not make the verb fail. STATUS runs every few
// seconds, so it logs an error only when it changes.
func ReportRepair(r *plugin.Request, locks Locker, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	changed := Changed("unrepaired-"+r.Plugin+"-"+r.Network, text)
	if err != nil && (changed || locks == Waiting) {
		r.Log.Warn("rules or limits of pods could not be restored", "error", err)
	}
}

// within returns the limit of a wait.
func (l Locker) within(most time.Duration) time.Duration {
	if l == Trying {
		return 0
	}
	return most
}

// Tolerate returns nil if err means that another process holds a lock for which l does not wait. Otherwise it returns err.
func (l Locker) Tolerate(err error) error {
	if l == Trying && plugin.Code(err) == plugin.CodeTryAgain {
		return nil
	}
	return err
}

// Node locks state that the pods of all networks share, such as "guards", against other writers.
func (l Locker) Node(what string) (unlock func(), err error) {
	dir, err := store.Make(store.Root, 0o700)
	if err != nil {
		return nil, err
	}
	lock, err := dir.LockWithin(l.within(store.NodeLockTimeout), "."+what+".lock", 0o600)
	if err != nil {
		dir.Close()
		return nil, err
	}
	return func() { _ = lock.Unlock(); dir.Close() }, nil
}

// Key locks an attachment for all plugins. For a key with only a network it locks the network. The folder must exist.
func (l Locker) Key(k Key) (*Attachment, error) {
	dir, err := store.Open(folder(k.Network))
	if err != nil {
		return nil, err
	}
	lock, err := dir.LockAtWithin(l.within(store.LockTimeout), lockFile, 0o600, k.offset())
	if err != nil {
		dir.Close()
		return nil, err
	}
	return &Attachment{Key: k, dir: dir, lock: lock}, nil
}

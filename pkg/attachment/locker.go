// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"io/fs"
	"time"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Locker determines whether a process waits for a lock that another one holds, or fails at once.
type Locker int

const (
	// Waiting means to wait until the other process releases the lock.
	Waiting Locker = iota

	// Trying means to fail at once. STATUS uses it, and ADD in an emptied lease folder: they restore what is lost, skip what a held lock
	// protects, and try again the next time.
	Trying
)

// ReportRestore logs the error of a restore; GC (Waiting) and STATUS (Trying) still succeed. STATUS runs every few seconds, so it logs an
// error only when it changes.
func ReportRestore(r *plugin.Request, locks Locker, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	changed := Changed(r, "unrestored", text)
	if err != nil && (changed || locks == Waiting) {
		r.Log.Warn("could not restore rules or limits of pods; 'podlace reload' tries again", "error", err)
	}
}

// within returns the maximum wait for a lock: most for Waiting, and zero for Trying.
func (l Locker) within(most time.Duration) time.Duration {
	if l == Trying {
		return 0
	}
	return most
}

// Tolerate returns nil if l is Trying and err means that another process holds the lock, and any other error unchanged.
func (l Locker) Tolerate(err error) error {
	if l == Trying && plugin.Code(err) == plugin.CodeTryAgain {
		return nil
	}
	return err
}

// Node acquires a lock on state that the pods of all networks share. what names this state, for example "bridges".
func (l Locker) Node(what string) (unlock func(), err error) {
	dir, err := store.Make(store.Root, 0o700)
	if err != nil {
		return nil, err
	}
	lock, err := dir.Lock(l.within(store.NodeLockTimeout), "."+what+".lock", 0o600)
	if err != nil {
		dir.Close()
		return nil, err
	}
	return func() { _ = lock.Unlock(); dir.Close() }, nil
}

// File acquires the flock(2) lock of a file in a folder.
func (l Locker) File(dir *store.Dir, name string, mode fs.FileMode) (*store.Lock, error) {
	return dir.Lock(l.within(store.LockTimeout), name, mode)
}

// Key acquires the lock of an attachment, so that no other plugin changes it, or that of the network if the key has nothing else. The
// network must have a folder of records.
func (l Locker) Key(k Key) (*Attachment, error) {
	dir, err := store.Open(folder(k.Network))
	if err != nil {
		return nil, err
	}
	return l.lock(dir, k, &plugin.Request{})
}

func (l Locker) lock(dir *store.Dir, k Key, r *plugin.Request) (*Attachment, error) {
	lock, err := dir.LockAt(l.within(store.LockTimeout), lockFile, 0o600, k.offset())
	if err != nil {
		dir.Close()
		return nil, err
	}
	return &Attachment{Key: k, plugin: r.Plugin, pod: r.Pod.String(), netns: r.NetnsPath, dir: dir, lock: lock}, nil
}

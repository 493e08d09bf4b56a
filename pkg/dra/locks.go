// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"fmt"
	"hash/fnv"
	"path/filepath"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/store"
)

// claimLocks is the lock file beside the folder of records. Its bytes are locks: of VFs by their addresses, and of claims by their UIDs.
// It works across instances of the daemon. The order of locks is: one claim, VFs by address, the gate of the daemon, a journal.
const claimLocks = "claims.lock"

// lockWait is how long Prepare waits for another call about the same claim or VF. The kubelet retries its calls.
const lockWait = 10 * time.Second

// lockPoll is the pause between attempts to take a lock.
const lockPoll = 20 * time.Millisecond

// firstClaim is larger than the number of any PCI address.
const firstClaim = 1 << 62

// locks are the locks of one claim and of VFs.
type locks struct {
	dir  *store.Dir
	held []*store.Lock
}

// lockClaim locks a claim.
func (d *Driver) lockClaim(uid string) (*locks, error) {
	dir, err := store.Make(filepath.Dir(d.options.Claims), 0o755)
	if err != nil {
		return nil, err
	}
	l := &locks{dir: dir}
	hash := fnv.New64a()
	hash.Write([]byte(uid))
	if err := l.add(firstClaim | int64(hash.Sum64()>>2)); err != nil {
		l.unlock()
		return nil, fmt.Errorf("another call is working on the claim: %w", err)
	}
	return l, nil
}

// LockDevices takes the locks of devices that Prepare and Unprepare take as well, in all instances of the daemon on the node. claims is
// the folder of records. It fails if another call or instance is working on a device.
func LockDevices(claims string, devices []pci.Address) (unlock func(), err error) {
	dir, err := store.Make(filepath.Dir(claims), 0o755)
	if err != nil {
		return nil, err
	}
	l := &locks{dir: dir}
	if err := l.lockVFs(devices); err != nil {
		l.unlock()
		return nil, err
	}
	return l.unlock, nil
}

// lockVFs locks each VF once.
func (l *locks) lockVFs(vfs []pci.Address) error {
	for _, a := range slices.Compact(slices.SortedFunc(slices.Values(vfs), pci.Address.Compare)) {
		if err := l.add(a.Number()); err != nil {
			return fmt.Errorf("device %s is being prepared or unprepared for another claim: %w", a, err)
		}
	}
	return nil
}

// add takes a lock. It polls, because a blocking wait cannot be cancelled, and would occupy a thread for each call about a claim whose
// driver hangs.
func (l *locks) add(offset int64) error {
	for until := time.Now().Add(lockWait); ; time.Sleep(lockPoll) {
		lock, err := l.dir.LockAtWithin(0, claimLocks, 0o600, offset)
		if err == nil {
			l.held = append(l.held, lock)
			return nil
		}
		var busy interface{ Busy() bool }
		if !errors.As(err, &busy) || time.Now().After(until) {
			return err
		}
	}
}

func (l *locks) unlock() {
	for _, lock := range slices.Backward(l.held) {
		lock.Unlock()
	}
	l.dir.Close()
}

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

// claimLocks is the lock file, in the parent folder of the claim records, of all instances on the node. Each byte is one lock, by the
// PCI address of a VF or the UID of a claim. Against deadlocks, locks are taken in this order: one claim, VFs by address, the daemon's
// allocation gate, one VF's journal.
const claimLocks = "claims.lock"

// lockWait is how long Prepare waits for another call about the same claim or VF. If it is too long, the kubelet calls Prepare again.
const lockWait = 10 * time.Second

// lockPoll is the pause between two attempts to take a lock.
const lockPoll = 20 * time.Millisecond

// firstClaim is the offset of the byte that locks the first claim, above that of any PCI address.
const firstClaim = 1 << 62

// claimLock contains the lock of one claim and the locks of the claim's VFs.
type claimLock struct {
	dir  *store.Dir
	held []*store.Lock
}

func openLocks(claims string) (*claimLock, error) {
	dir, err := store.Make(filepath.Dir(claims), 0o755)
	return &claimLock{dir: dir}, err
}

func (d *Driver) lockClaim(uid string) (*claimLock, error) {
	l, err := openLocks(d.options.Claims)
	if err != nil {
		return nil, err
	}
	hash := fnv.New64a()
	hash.Write([]byte(uid))
	if err := l.add(firstClaim | int64(hash.Sum64()>>2)); err != nil {
		l.unlock()
		return nil, fmt.Errorf("another call is working on the claim: %w", err)
	}
	return l, nil
}

// LockDevices takes the locks of devices, as Prepare and Unprepare do, also against other instances on the node. claims is the folder
// of the claim records. It fails if another call or instance is working on one of the devices.
func LockDevices(claims string, devices []pci.Address) (unlock func(), err error) {
	l, err := openLocks(claims)
	if err != nil {
		return nil, err
	}
	if err := l.lockVFs(devices); err != nil {
		l.unlock()
		return nil, err
	}
	return l.unlock, nil
}

// lockVFs takes the locks of the given VFs, one lock for each VF even if the list has duplicates.
func (l *claimLock) lockVFs(vfs []pci.Address) error {
	for _, a := range slices.Compact(slices.SortedFunc(slices.Values(vfs), pci.Address.Compare)) {
		if err := l.add(a.Number()); err != nil {
			return fmt.Errorf("device %s is being prepared or unprepared for another claim: %w", a, err)
		}
	}
	return nil
}

// add takes a lock. It polls, because a blocking wait cannot be cancelled and would occupy a thread for as long as a driver hangs.
func (l *claimLock) add(offset int64) error {
	for until := time.Now().Add(lockWait); ; time.Sleep(lockPoll) {
		lock, err := l.dir.LockAt(0, claimLocks, 0o600, offset)
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

func (l *claimLock) unlock() {
	for _, lock := range slices.Backward(l.held) {
		lock.Unlock()
	}
	l.dir.Close()
}

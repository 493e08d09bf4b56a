// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// LockTimeout is the usual maximum wait for a lock. It is shorter than a runtime's timeout for a CNI command, which is a minute or more and
// followed by a retry.
const LockTimeout = 10 * time.Second

// NodeLockTimeout is the maximum wait for a lock that all pods of the node need. It is longer, because many pods can start at once: for
// example, the iptables processes of a hundred ADDs keep two CPUs busy for more than ten seconds.
const NodeLockTimeout = 3 * LockTimeout

// Lock takes an exclusive flock(2) on a file in the folder, which it creates if necessary. If another process still holds it after the
// given time, Lock returns an error with the method Busy; with 0, it does not wait. Unlock or the end of the process releases the lock.
func (d *Dir) Lock(most time.Duration, name string, mode fs.FileMode) (*Lock, error) {
	return d.lock(most, name, mode, func(fd int, how lockAction) error {
		return unix.Flock(fd, map[lockAction]int{try: unix.LOCK_EX | unix.LOCK_NB, wait: unix.LOCK_EX, free: unix.LOCK_UN}[how])
	})
}

// LockAt is like Lock, but locks only the byte at offset (fcntl(2), open file description locks), so one file contains 2^63 locks. Separate
// lock files would have to be removed later, which cannot be done safely.
func (d *Dir) LockAt(most time.Duration, name string, mode fs.FileMode, offset int64) (*Lock, error) {
	return d.lock(most, name, mode, func(fd int, how lockAction) error {
		cmd, kind := unix.F_OFD_SETLK, int16(unix.F_WRLCK)
		switch how {
		case wait:
			cmd = unix.F_OFD_SETLKW
		case free:
			kind = unix.F_UNLCK
		}
		return unix.FcntlFlock(uintptr(fd), cmd, &unix.Flock_t{Type: kind, Start: offset, Len: 1})
	})
}

// lockAction is an operation on a lock: try to take it, wait for it, or free it.
type lockAction int

const (
	try lockAction = iota
	wait
	free
)

// lock opens the file and locks it with set. If the file was replaced or removed meanwhile, it tries again, because other processes would
// lock the new file.
func (d *Dir) lock(most time.Duration, name string, mode fs.FileMode, set func(fd int, how lockAction) error) (*Lock, error) {
	defer fault.Phase("lock")()
	deadline := time.Now().Add(most)
	for {
		f, err := d.openFile(name, os.O_RDWR|os.O_CREATE, mode)
		if err != nil {
			return nil, err
		}
		if most > 0 {
			err = takeWithDeadline(f, deadline, set)
		} else {
			err = set(int(f.Fd()), try)
		}
		if err != nil {
			if most <= 0 && isHeld(err) {
				f.Close()
				return nil, lockHeld("lock %s: held by another process", filepath.Join(d.path, name))
			}
			if errors.Is(err, errLockTimeout) {
				return nil, lockHeld("lock %s: held by another process for %v", filepath.Join(d.path, name), most)
			}
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", filepath.Join(d.path, name), err)
		}
		l := &Lock{f, d, name, func(fd int) error { return set(fd, free) }}
		if !l.Lost() {
			return l, nil
		}
		l.Unlock()
		if time.Now().After(deadline) {
			return nil, lockHeld("lock %s: removed again and again for %v", filepath.Join(d.path, name), most)
		}
	}
}

// lockHeldError means that another process holds the lock.
type lockHeldError string

func lockHeld(format string, args ...any) error { return lockHeldError(fmt.Sprintf(format, args...)) }

func (e lockHeldError) Error() string { return string(e) }

// Busy returns true, because a retry may succeed after the other process has released the lock.
func (lockHeldError) Busy() bool { return true }

// isHeld reports whether locking failed because another process holds the lock.
func isHeld(err error) bool { return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) }

var errLockTimeout = errors.New("held by another process")

// takeWithDeadline takes the lock. It waits in the kernel, which wakes the waiting one after the other; a hundred polling processes would
// keep a CPU busy. After errLockTimeout, its goroutine still waits, and closes the file when the kernel grants the lock.
func takeWithDeadline(f *os.File, deadline time.Time, set func(fd int, how lockAction) error) error {
	fd := int(f.Fd())
	err := set(fd, try)
	if !isHeld(err) {
		return err
	}
	done := make(chan error)
	late := make(chan struct{})
	go func() {
		err := set(fd, wait)
		for errors.Is(err, unix.EINTR) {
			err = set(fd, wait)
		}
		select {
		case done <- err:
		case <-late:
			f.Close()
		}
	}()
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	select {
	case err := <-done:
		return err
	case <-timer.C:
		close(late)
		return errLockTimeout
	}
}

// Lock is a lock that this process holds.
type Lock struct {
	f    *os.File
	dir  *Dir
	name string
	free func(fd int) error
}

// Lost reports whether the lock file was removed or replaced, so that another process may hold a lock with the same name.
func (l *Lock) Lost() bool {
	var own, there unix.Stat_t
	if unix.Fstat(int(l.f.Fd()), &own) != nil || unix.Fstatat(int(l.dir.self.Fd()), l.name, &there, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return true
	}
	return own.Dev != there.Dev || own.Ino != there.Ino
}

// File returns the open lock file. A child process that inherits it holds the lock until the child ends, even if its parent is killed.
func (l *Lock) File() *os.File { return l.f }

// Unlock releases the lock, also for child processes that inherited the file.
func (l *Lock) Unlock() error { return errors.Join(l.free(int(l.f.Fd())), l.f.Close()) }

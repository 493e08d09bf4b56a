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

// LockTimeout is how long Lock waits. A runtime allows a verb a minute or more, and retries.
const LockTimeout = 10 * time.Second

// NodeLockTimeout is for locks that all pods of the node need. A hundred pods that start at once, each with some iptables processes, keep
// two CPUs busy for more than ten seconds.
const NodeLockTimeout = 3 * LockTimeout

// Lock takes an exclusive flock(2) on the file name, and creates the file if necessary. After LockTimeout it returns an error with Busy.
// The lock ends with Unlock, or with the process.
func (d *Dir) Lock(name string, mode fs.FileMode) (*Lock, error) {
	return d.LockWithin(LockTimeout, name, mode)
}

// LockWithin is Lock with another timeout. With 0 it never waits.
func (d *Dir) LockWithin(most time.Duration, name string, mode fs.FileMode) (*Lock, error) {
	return d.lock(most, name, mode, func(fd int, how action) error {
		return unix.Flock(fd, map[action]int{try: unix.LOCK_EX | unix.LOCK_NB, wait: unix.LOCK_EX, free: unix.LOCK_UN}[how])
	})
}

// LockAt is Lock for one of 2^63 locks in the file: the byte at offset (fcntl(2), open file description locks). Separate lock files would
// need a cleanup, which cannot be done safely.
func (d *Dir) LockAt(name string, mode fs.FileMode, offset int64) (*Lock, error) {
	return d.LockAtWithin(LockTimeout, name, mode, offset)
}

// LockAtWithin is LockAt with another timeout. With 0 it never waits.
func (d *Dir) LockAtWithin(most time.Duration, name string, mode fs.FileMode, offset int64) (*Lock, error) {
	return d.lock(most, name, mode, func(fd int, how action) error {
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

// action is an operation on a lock.
type action int

const (
	try action = iota
	wait
	free
)

// lock opens the file and locks it with set. It retries if the file was removed or replaced meanwhile, because other processes would lock
// another file.
func (d *Dir) lock(most time.Duration, name string, mode fs.FileMode, set func(fd int, how action) error) (*Lock, error) {
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

// lockHeldError means that another process holds a lock.
type lockHeldError string

func lockHeld(format string, args ...any) error { return lockHeldError(fmt.Sprintf(format, args...)) }

func (e lockHeldError) Error() string { return string(e) }

// Busy reports that a retry may succeed.
func (lockHeldError) Busy() bool { return true }

// isHeld reports whether an attempt failed because another process holds the lock.
func isHeld(err error) bool { return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) }

var errLockTimeout = errors.New("held by another process")

// takeWithDeadline takes the lock. The kernel wakes waiting processes one after the other; a hundred that poll would keep a CPU busy while
// the lock is idle. After errLockTimeout the file stays open as long as the kernel's request is pending.
func takeWithDeadline(f *os.File, deadline time.Time, set func(fd int, how action) error) error {
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

// Lock is a held lock.
type Lock struct {
	f    *os.File
	dir  *Dir
	name string
	free func(fd int) error
}

// Lost reports whether the lock file was removed or replaced, so that another process may hold a lock of the same name.
func (l *Lock) Lost() bool {
	var own, there unix.Stat_t
	if unix.Fstat(int(l.f.Fd()), &own) != nil || unix.Fstatat(int(l.dir.self.Fd()), l.name, &there, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return true
	}
	return own.Dev != there.Dev || own.Ino != there.Ino
}

// File returns the open lock file. A child process that inherits it holds the lock until it ends, even if this process was killed.
func (l *Lock) File() *os.File { return l.f }

// Unlock releases the lock, also for children that inherited it.
func (l *Lock) Unlock() error { return errors.Join(l.free(int(l.f.Fd())), l.f.Close()) }

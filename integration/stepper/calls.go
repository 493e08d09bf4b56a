// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"maps"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// calls are the system calls that can change durable or kernel state.
func calls() map[uint64]string {
	m := map[uint64]string{
		unix.SYS_WRITE: "write", unix.SYS_PWRITE64: "pwrite64", unix.SYS_WRITEV: "writev",
		unix.SYS_SENDTO: "sendto", unix.SYS_SENDMSG: "sendmsg", unix.SYS_SENDMMSG: "sendmmsg",
		unix.SYS_OPENAT: "openat", unix.SYS_OPENAT2: "openat2", unix.SYS_MKDIRAT: "mkdirat",
		unix.SYS_UNLINKAT: "unlinkat", unix.SYS_LINKAT: "linkat", unix.SYS_SYMLINKAT: "symlinkat",
		unix.SYS_RENAMEAT: "renameat", unix.SYS_RENAMEAT2: "renameat2",
		unix.SYS_FTRUNCATE: "ftruncate", unix.SYS_FSYNC: "fsync", unix.SYS_FDATASYNC: "fdatasync",
		unix.SYS_FLOCK: "flock", unix.SYS_FCNTL: "fcntl", unix.SYS_FCHMOD: "fchmod",
		unix.SYS_UTIMENSAT: "utimensat", unix.SYS_SETNS: "setns", unix.SYS_UNSHARE: "unshare",
		unix.SYS_MOUNT: "mount", unix.SYS_UMOUNT2: "umount2", unix.SYS_EXECVE: "execve",
		unix.SYS_IOCTL: "ioctl", unix.SYS_SETSOCKOPT: "setsockopt", unix.SYS_EXIT_GROUP: "exit_group",
	}
	maps.Copy(m, oldCalls())
	return m
}

// changing returns the name of the call if, with these arguments, it can change
// something outside the process.
func changing(tid int, c call, name string) string {
	switch name {
	case "open":
		return onlyIf(writes(c.args[1]), name)
	case "openat":
		return onlyIf(writes(c.args[2]), name)
	case "write", "writev":
		return onlyIf(!private(tid, c.args[0]), name)
	case "fcntl":
		return onlyIf(locks(c.args[1]), name)
	case "ioctl":
		return onlyIf(c.args[1] != unix.TCGETS, name)
	case "setsockopt":
		return onlyIf(replacesTable(c.args[1], c.args[2]), name)
	}
	return name
}

func onlyIf(wanted bool, name string) string {
	if wanted {
		return name
	}
	return ""
}

func writes(flags uint64) bool {
	return flags&(unix.O_CREAT|unix.O_TRUNC) != 0
}

func locks(command uint64) bool {
	switch command {
	case unix.F_SETLK, unix.F_SETLKW, unix.F_OFD_SETLK, unix.F_OFD_SETLKW:
		return true
	}
	return false
}

// replacesTable is how the old iptables changes its rules.
func replacesTable(level, option uint64) bool {
	const replace = 64
	return (level == unix.SOL_IP || level == unix.SOL_IPV6) && option == replace
}

// private tells a descriptor that nobody else can see, such as the eventfd by
// which the Go runtime wakes its own threads.
func private(tid int, fd uint64) bool {
	target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", tid, fd))
	return err == nil && strings.HasPrefix(target, "anon_inode:")
}

// SPDX-License-Identifier: Apache-2.0

package main

import "golang.org/x/sys/unix"

// oldCalls are those that newer architectures no longer have.
func oldCalls() map[uint64]string {
	return map[uint64]string{
		unix.SYS_OPEN: "open", unix.SYS_MKDIR: "mkdir", unix.SYS_RMDIR: "rmdir", unix.SYS_UNLINK: "unlink",
		unix.SYS_LINK: "link", unix.SYS_SYMLINK: "symlink", unix.SYS_RENAME: "rename",
	}
}

// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// mountsEnv names the file of a mount namespace. In a privileged container with the node's processes, that is /proc/1/ns/mnt.
const mountsEnv = "PODLACE_MOUNTS"

// EnterMounts runs the program again in the mount namespace that PODLACE_MOUNTS names. It is a no-op without this variable.
func EnterMounts() error {
	name := os.Getenv(mountsEnv)
	if name == "" {
		return nil
	}
	mounts, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("%s: %w", mountsEnv, err)
	}
	runtime.LockOSThread() // exec keeps the namespaces of this thread
	err = unix.Unshare(unix.CLONE_FS)
	if err == nil {
		err = unix.Setns(int(mounts.Fd()), unix.CLONE_NEWNS)
	}
	if err == nil {
		err = os.Unsetenv(mountsEnv)
	}
	if err == nil {
		err = unix.Exec("/proc/self/exe", os.Args, os.Environ())
	}
	return fmt.Errorf("%s: enter %s: %w: the container must be privileged, with hostPID", mountsEnv, name, err)
}

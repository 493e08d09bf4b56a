// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// coveredFolders returns the folders with the state of runtimes and plugins, over which the sandbox mounts an empty tmpfs.
func coveredFolders() []string { return []string{"/run", "/var/lib"} }

func prepareMounts(parent string) error {
	self, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return fmt.Errorf("own network namespace: %w", err)
	}
	if self == parent {
		return fmt.Errorf("%s is set, yet the network namespace is still the parent's", markEnv)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make all mounts private: %w", err)
	}
	for _, dir := range coveredFolders() {
		if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
			return fmt.Errorf("mount tmpfs on %s: %w", dir, err)
		}
	}
	for _, dir := range []string{netnsDir, "/run/lock"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	freshSysfs()
	return loopbackUp()
}

// freshSysfs mounts a new sysfs, so that /sys/class/net shows the sandbox's network. If the kernel refuses, for example in a container that
// masks a part of /sys, the old one stays, because few programs need it.
func freshSysfs() {
	const cgroups, kept = "/sys/fs/cgroup", "/run/.cgroup"
	if os.Mkdir(kept, 0o700) != nil {
		return
	}
	defer func() { _ = os.Remove(kept) }() // empty, and on a tmpfs
	haveCgroups := unix.Mount(cgroups, kept, "", unix.MS_BIND|unix.MS_REC, "") == nil
	if haveCgroups {
		defer unix.Unmount(kept, unix.MNT_DETACH) //nolint:errcheck // goes with the namespace at the latest
	}
	if unix.Mount("sysfs", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "") == nil && haveCgroups {
		_ = unix.Mount(kept, cgroups, "", unix.MS_BIND|unix.MS_REC, "")
	}
}

func loopbackUp() error {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer handle.Close()
	lo, err := handle.LinkByName("lo")
	if err == nil {
		err = handle.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

// checkVisible returns an error if the program needs a folder that the sandbox would hide.
func checkVisible() error {
	var errs []error
	for what, path := range neededFolders() {
		errs = append(errs, visible(what, path))
	}
	return errors.Join(errs...)
}

// neededFolders returns the folders that the program uses and that exist, since only these can be hidden.
func neededFolders() map[string]string {
	paths := map[string]string{"temporary folder": os.TempDir()}
	if wd, err := os.Getwd(); err == nil {
		paths["working directory"] = wd
	}
	if exe, err := os.Executable(); err == nil {
		paths["executable"] = exe
	}
	return paths
}

func visible(what, path string) error {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil
	}
	for _, dir := range coveredFolders() {
		if real == dir || strings.HasPrefix(real, dir+"/") {
			return fmt.Errorf("the %s %s lies below %s, which the sandbox covers with an empty folder: "+
				"move it elsewhere (TMPDIR)", what, path, dir)
		}
	}
	return nil
}

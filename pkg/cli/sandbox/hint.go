// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// sysctlFile returns the sysctl at a path below /proc/sys, or "" if there is none.
func sysctlFile(path string) string {
	b, err := os.ReadFile("/proc/sys/" + path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// namespaceHint returns advice for when the kernel refuses to create namespaces.
func namespaceHint(err error, sysctl func(path string) string) string {
	var text string
	switch {
	case errors.Is(err, unix.ENOSPC):
		text = exhausted(sysctl)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		text = refused(sysctl)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS):
		text = "the kernel seems to be built without CONFIG_USER_NS, CONFIG_NET_NS or CONFIG_UTS_NS"
	case errors.Is(err, unix.EUSERS):
		text = "user namespaces are nested too deeply (the kernel allows 32)"
	default:
		return ""
	}
	return " (" + text + ")"
}

func exhausted(sysctl func(string) string) string {
	for _, kind := range []string{"user", "net", "mnt", "uts"} {
		name := "user/max_" + kind + "_namespaces"
		if sysctl(name) == "0" {
			name = strings.ReplaceAll(name, "/", ".")
			return name + " is 0: as root run `sysctl -w " + name + "=10000`"
		}
	}
	return "a limit on namespaces is reached: see user.max_user_namespaces, user.max_net_namespaces, user.max_mnt_namespaces and user.max_uts_namespaces"
}

func refused(sysctl func(string) string) string {
	switch {
	case sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
		return "AppArmor forbids it to ordinary users, as on Ubuntu 24.04: run as root, " +
			"or as root run `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`"
	case sysctl("kernel/unprivileged_userns_clone") == "0":
		return "kernel.unprivileged_userns_clone is 0: run as root, " +
			"or as root run `sysctl -w kernel.unprivileged_userns_clone=1`"
	}
	return "a container's seccomp profile, a security module or a chroot may forbid it: " +
		"run as root outside of the container, or start the container with --privileged"
}

// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestHint(t *testing.T) {
	for _, c := range []struct {
		err     error
		sysctls map[string]string
		want    string
	}{
		{unix.ENOSPC, map[string]string{"user/max_user_namespaces": "0"}, "sysctl -w user.max_user_namespaces=10000"},
		{unix.ENOSPC, map[string]string{"user/max_user_namespaces": "9", "user/max_net_namespaces": "0"}, "user.max_net_namespaces is 0"},
		{unix.ENOSPC, nil, "a limit on namespaces is reached"},
		{unix.EPERM, map[string]string{"kernel/apparmor_restrict_unprivileged_userns": "1"},
			"sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"},
		{unix.EACCES, map[string]string{"kernel/apparmor_restrict_unprivileged_userns": "1"}, "Ubuntu 24.04"},
		{unix.EPERM, map[string]string{"kernel/unprivileged_userns_clone": "0"}, "sysctl -w kernel.unprivileged_userns_clone=1"},
		{unix.EPERM, nil, "--privileged"},
		{unix.EINVAL, nil, "CONFIG_USER_NS"},
		{unix.EUSERS, nil, "nested too deeply"},
		{unix.EIO, nil, ""},
	} {
		got := namespaceHint(fmt.Errorf("start: %w", c.err), func(path string) string { return c.sysctls[path] })
		if !strings.Contains(got, c.want) || (c.want == "") != (got == "") {
			t.Errorf("%v, %v: %q, want %q in it", c.err, c.sysctls, got, c.want)
		}
	}
}

func TestParseIDMap(t *testing.T) {
	got, err := parseIDMap("         0       1000          1\n         1     100000      65536\n")
	want := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}, {ContainerID: 1, HostID: 1, Size: 65536}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
	for _, bad := range []string{"", "a b c\n", "1 2\n"} {
		if _, err := parseIDMap(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

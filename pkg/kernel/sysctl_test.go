// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"io/fs"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

func TestSysctl(t *testing.T) {
	kerneltest.Clean(t)
	h := host(t)
	const path = "ipv4/conf/lo/arp_notify"
	t.Cleanup(func() { kerneltest.Must(t, h.Set(Sysctl{path, "0"})) })
	for _, want := range []string{"1", "1", "0", "1"} {
		kerneltest.Must(t, h.Set(Sysctl{path, want}))
		if got, err := h.Get(path); got != want || err != nil {
			t.Errorf("got %q, %v, want %s", got, err, want)
		}
	}
}

// TestSysctlMissing: for a setting that the kernel does not have, Set returns no error, and Get fs.ErrNotExist.
func TestSysctlMissing(t *testing.T) {
	kerneltest.Clean(t)
	h := host(t)
	kerneltest.Must(t, h.Set(Sysctl{"ipv6/conf/none/accept_ra", "0"}))
	if _, err := h.Get("ipv6/conf/none/accept_ra"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestSysctlRefused(t *testing.T) {
	kerneltest.Clean(t)
	h := host(t)
	if err := h.Set(Sysctl{"ipv4/ip_forward", "nonsense"}); err == nil {
		t.Error("nonsense was written")
	}
	// Set stops at the first error.
	if err := h.Set(Sysctl{"ipv4/ip_forward", "x"}, Sysctl{"ipv4/conf/lo/arp_notify", "1"}); err == nil {
		t.Error("nonsense was written")
	}
}

// TestSysctlReadOnly: with a read-only /proc/sys, as in a container, Set succeeds for a value that is there already, and otherwise says why
// not.
func TestSysctlReadOnly(t *testing.T) {
	kerneltest.Clean(t)
	const path = "ipv4/conf/lo/arp_notify"
	before, err := host(t).Get(path)
	kerneltest.Must(t, err, unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""))
	t.Cleanup(func() { kerneltest.Must(t, unix.Unmount("/proc/sys", unix.MNT_DETACH)) })
	kerneltest.Must(t, unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	h := host(t)
	kerneltest.Must(t, h.Set(Sysctl{path, before}))
	if err := h.Set(Sysctl{path, "7"}); !errors.Is(err, unix.EROFS) {
		t.Errorf("got %v, want %v", err, unix.EROFS)
	}
}

// TestForwards: Forwards, which uses netlink, equals the sysctl files.
func TestForwards(t *testing.T) {
	kerneltest.Clean(t)
	h := host(t)
	for path, is4 := range map[string]bool{"ipv4/ip_forward": true, "ipv6/conf/all/forwarding": false} {
		before, err := h.Get(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { kerneltest.Must(t, h.Set(Sysctl{path, before})) })
		for _, value := range []string{"0", "1", "0"} {
			kerneltest.Must(t, h.Set(Sysctl{path, value}))
			if on, err := h.Forwards(is4); err != nil || on != (value == "1") {
				t.Errorf("%s is %s: %t, %v", path, value, on, err)
			}
		}
	}
}

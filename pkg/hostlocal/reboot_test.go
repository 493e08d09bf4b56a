// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/kernel/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
)

// setBootID simulates a reboot. In the sandbox's mount namespace, a file with another ID is mounted over the kernel's boot ID.
func (l lab) setBootID(id string) {
	l.Helper()
	const path = "/proc/sys/kernel/random/boot_id"
	file := filepath.Join(l.TempDir(), "boot_id")
	if err := os.WriteFile(file, []byte(id+"\n"), 0o600); err != nil {
		l.Fatal(err)
	}
	if err := unix.Mount(file, path, "", unix.MS_BIND, ""); err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
}

// TestReboot (F-27) checks that ADD collects the leases of an earlier boot if the pool is exhausted. The order of the leases does not
// matter. Leases of the current boot must not be collected.
func TestReboot(t *testing.T) {
	l := newLab(t, tiny)
	for i := range 4 {
		l.mustGive(fmt.Sprint("old", i), fmt.Sprintf("10.1.2.%d/29", i+2))
	}
	l.setBootID("11111111-0000-0000-0000-000000000000")
	l.mustGive("new0", "10.1.2.6/29")
	for i := 1; i < 5; i++ {
		if a := l.call("ADD", fmt.Sprint("new", i), ""); a.Code != 0 {
			t.Fatalf("ADD new%d: %+v", i, a)
		}
	}
	l.mustFail(l.call("ADD", "new5", ""), plugin.CodeExhausted, "no IP addresses available")
	l.ok(l.call("DEL", "old0", "", "CNI_NETNS="))
	l.mustFail(l.call("ADD", "new5", ""), plugin.CodeExhausted, "no IP addresses available")
}

// TestRebootSameContainer checks that a container gets an address when the container restarts after a reboot, although the container's old
// lease still exists.
func TestRebootSameContainer(t *testing.T) {
	l := newLab(t, tiny)
	l.mustGive("a", "10.1.2.2/29")
	l.mustFail(l.call("ADD", "a", ""), plugin.CodeAddressTaken, "duplicate allocation is not allowed")
	l.setBootID("22222222-0000-0000-0000-000000000000")
	l.mustGive("a", "10.1.2.3/29")
	if l.files()["10.1.2.2"] != "" {
		t.Error("the lease of the earlier boot is left")
	}
}

// TestUnindexedLeaseIsLive checks that a lease which is not in the index is never collected. The reference plugin creates leases of this
// kind.
func TestUnindexedLeaseIsLive(t *testing.T) {
	l := newLab(t, `"subnet":"10.1.2.0/30"`) // only .2
	l.put("10.1.2.2", "foreign\r\neth0")
	l.mustFail(l.call("ADD", "a", ""), plugin.CodeExhausted, "no IP addresses available")
	l.mustFail(l.call("ADD", "foreign", ""), plugin.CodeAddressTaken, "duplicate allocation is not allowed")
	l.ok(l.call("DEL", "foreign", ""))
	l.mustGive("a", "10.1.2.2/30")
}

// TestDeadNamespace checks an exhausted pool: ADD collects the lease of a pod whose namespace is gone.
func TestDeadNamespace(t *testing.T) {
	l := newLab(t, `"subnet":"10.1.2.0/30"`)
	pod := kerneltest.NewPod(t)
	l.ok(l.call("ADD", "dead", "", "CNI_NETNS="+pod.Path))
	l.mustFail(l.call("ADD", "a", ""), plugin.CodeExhausted, "no IP addresses available")
	if err := pod.Close(); err != nil {
		t.Fatal(err)
	}
	l.mustGive("a", "10.1.2.2/30")
}

// renew() replaces a container's lease by an equal lease with the given modification time. The reference plugin replaces a lease in this
// way for a recreated pod.
func (l lab) renew(addr, id string, at time.Time) {
	l.Helper()
	if err := os.Remove(filepath.Join(l.dir, addr)); err != nil {
		l.Fatal(err)
	}
	l.put(addr, id+"\r\neth0")
	if err := os.Chtimes(filepath.Join(l.dir, addr), at, at); err != nil {
		l.Fatal(err)
	}
}

// TestRenewedByOthers (F-44) checks a container that another program attached again, in another namespace or boot. The container keeps its
// address, although its previous pod is dead. The container must keep its address even if the clock was set back between the two
// attachments.
func TestRenewedByOthers(t *testing.T) {
	for name, age := range map[string]time.Duration{"later": 0, "clock set back": time.Hour} {
		t.Run("namespace, "+name, func(t *testing.T) {
			l := newLab(t, `"subnet":"10.1.2.0/30"`) // only .2
			pod := kerneltest.NewPod(t)
			l.ok(l.call("ADD", "pod", "", "CNI_NETNS="+pod.Path))
			l.renew("10.1.2.2", "pod", time.Now().Add(-age))
			if err := pod.Close(); err != nil {
				t.Fatal(err)
			}
			seen, err := Leases(l.dir)
			if err != nil || len(seen) != 1 || seen[0].Netns != "" || seen[0].Earlier {
				t.Errorf("looked at: %+v, %v", seen, err)
			}
			for range 2 { // the second time after a rebuild of the index
				l.mustFail(l.call("ADD", "a", ""), plugin.CodeExhausted, "no IP addresses available")
				l.mustFail(l.call("ADD", "a", `"runtimeConfig":{"ips":["10.1.2.2"]}`), plugin.CodeAddressTaken, "is not available")
			}
			l.ok(l.call("DEL", "pod", ""))
			l.mustGive("a", "10.1.2.2/30")
		})
		t.Run("boot, "+name, func(t *testing.T) {
			l := newLab(t, `"subnet":"10.1.2.0/30"`)
			l.mustGive("pod", "10.1.2.2/30")
			l.setBootID("33333333-0000-0000-0000-000000000000")
			if seen, err := Leases(l.dir); err != nil || len(seen) != 1 || !seen[0].Earlier {
				t.Errorf("looked at: %+v, %v", seen, err)
			}
			l.renew("10.1.2.2", "pod", time.Now().Add(-age))
			if seen, err := Leases(l.dir); err != nil || len(seen) != 1 || seen[0].Earlier {
				t.Errorf("looked at: %+v, %v", seen, err)
			}
			l.mustFail(l.call("ADD", "a", ""), plugin.CodeExhausted, "no IP addresses available")
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
)

// setBootID simulates a reboot. setBootID mounts a file with another ID over the kernel's boot ID, in the mount namespace of the sandbox.
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

// TestReboot (F-27) checks that ADD collects the leases of an earlier boot if the pool is exhausted. The result of ADD must not depend on
// the order of the leases. ADD must not collect leases of the current boot.
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

// TestRebootSameContainer: a container restarts after a reboot, and its old lease still exists. The restarted container must get an
// address.
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

// TestUnindexedLeaseIsLive checks that ADD never collects a lease that is missing from the index. The reference plugin creates leases
// without an index entry.
func TestUnindexedLeaseIsLive(t *testing.T) {
	l := newLab(t, `"subnet":"10.1.2.0/30"`) // only .2
	l.put("10.1.2.2", "foreign\r\neth0")
	l.mustFail(l.call("ADD", "a", ""), plugin.CodeExhausted, "no IP addresses available")
	l.mustFail(l.call("ADD", "foreign", ""), plugin.CodeAddressTaken, "duplicate allocation is not allowed")
	l.ok(l.call("DEL", "foreign", ""))
	l.mustGive("a", "10.1.2.2/30")
}

// TestDeadNamespace: if the pool is exhausted, ADD collects the lease of a pod whose namespace is gone.
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

// renew() replaces the lease of a container by an equal lease with the given modification time. The reference plugin does the same when a
// pod is created again.
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

// TestRenewedByOthers (F-44): another program attaches a container again, in another namespace or after a reboot. The container must keep
// its address, although its previous pod is dead. The container must keep its address even if the clock was set back between the two
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

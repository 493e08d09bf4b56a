// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// reboot simulates a reboot. The records are gone, the kernel has another boot ID, through a file mounted over its own in the sandbox, and
// the leases are older than the machine's real boot.
func (l lab) reboot() {
	l.Helper()
	const path = "/proc/sys/kernel/random/boot_id"
	file := filepath.Join(l.TempDir(), "boot_id")
	if err := os.WriteFile(file, fmt.Appendf(nil, "boot-%d\n", time.Now().UnixNano()), 0o600); err != nil {
		l.Fatal(err)
	}
	if err := unix.Mount(file, path, "", unix.MS_BIND, ""); err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	if err := os.RemoveAll(filepath.Join(store.Root, l.network)); err != nil {
		l.Fatal(err)
	}
	for addr := range l.leasesOf() {
		l.setAge(addr, longAgo)
	}
}

// longAgo is longer than the test machine has been running.
const longAgo = 10 * 365 * 24 * time.Hour

func (l lab) setAge(addr string, age time.Duration) {
	l.Helper()
	at := time.Now().Add(-age)
	if err := os.Chtimes(filepath.Join(l.dir, addr), at, at); err != nil {
		l.Fatal(err)
	}
}

const tiny = `"subnet":"10.1.2.0/29"` // addresses .2 to .6

// A full pool gives the addresses of pods of an earlier boot, the oldest lease first, and none of this boot (F-27).
func TestReboot(t *testing.T) {
	l := newLab(t, tiny)
	for i := range 4 {
		l.mustGive(fmt.Sprint("old", i), fmt.Sprintf("10.1.2.%d/29", i+2))
	}
	l.reboot()
	l.setAge("10.1.2.4", 2*longAgo)
	l.mustGive("new0", "10.1.2.6/29")
	l.mustGive("new1", "10.1.2.4/29")
	for i := 2; i < 5; i++ {
		l.ok(l.call("ADD", fmt.Sprint("new", i), ""))
	}
	l.mustFail(l.call("ADD", "new5", ""), plugin.CodeExhausted, "no IP addresses available")
	l.ok(l.call("DEL", "old0", "", "CNI_NETNS="))
	l.mustFail(l.call("ADD", "new5", ""), plugin.CodeExhausted, "no IP addresses available")
}

// If a container is attached again after a reboot without a DEL, its DEL releases what its record names. The next DEL finds no record and
// releases the rest.
func TestRebootSameContainer(t *testing.T) {
	l := newLab(t, tiny)
	l.mustGive("a", "10.1.2.2/29")
	l.mustFail(l.call("ADD", "a", ""), plugin.CodeAddressTaken, "duplicate allocation is not allowed")
	l.reboot()
	l.mustGive("a", "10.1.2.3/29")
	l.ok(l.call("DEL", "a", ""))
	l.ok(l.call("DEL", "a", ""))
	if left := l.leasesOf(); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

// A pod can request the address of its predecessor in an earlier boot.
func TestRequestedAfterReboot(t *testing.T) {
	const wish = `"runtimeConfig":{"ips":["10.1.2.2"]}`
	l := newLab(t, tiny)
	l.mustGive("a", "10.1.2.2/29")
	l.mustFail(l.call("ADD", "b", wish), plugin.CodeAddressTaken, "it is leased to container a, interface eth0")
	l.reboot()
	l.ok(l.call("ADD", "b", wish))
	l.mustFail(l.call("ADD", "c", wish), plugin.CodeAddressTaken, "it is leased to container b")
}

// In a full pool, none of these leases may be taken, because their pods may live.
func TestLiveKeepTheirs(t *testing.T) {
	refused := func(l lab) {
		t.Helper()
		l.mustFail(l.call("ADD", "new", ""), plugin.CodeExhausted, "no IP addresses available")
		l.mustFail(l.call("ADD", "new", `"runtimeConfig":{"ips":["10.1.2.2"]}`), plugin.CodeAddressTaken, "is not available")
	}
	const only = `"subnet":"10.1.2.0/30"` // .2
	t.Run("folder that another program has used", func(t *testing.T) {
		l := newLab(t, only)
		l.put("10.1.2.2", "foreign\r\neth0")
		l.setAge("10.1.2.2", longAgo)
		refused(l)
		refused(l)
		l.ok(l.call("DEL", "foreign", ""))
		l.mustGive("new", "10.1.2.2/30")
	})
	t.Run("records lost in the same boot", func(t *testing.T) {
		l := newLab(t, only)
		l.mustGive("a", "10.1.2.2/30")
		if err := os.RemoveAll(filepath.Join(store.Root, l.network)); err != nil {
			t.Fatal(err)
		}
		refused(l)
	})
	t.Run("boot file lost", func(t *testing.T) {
		l := newLab(t, only)
		l.mustGive("a", "10.1.2.2/30")
		l.reboot()
		if err := os.Remove(filepath.Join(l.dir, bootFile)); err != nil {
			t.Fatal(err)
		}
		refused(l)
		l.reboot()
		l.mustGive("new", "10.1.2.2/30")
	})
	t.Run("made by another program in this boot, before Podlace used the folder", func(t *testing.T) {
		l := newLab(t, only)
		l.mustGive("a", "10.1.2.2/30")
		l.ok(l.call("DEL", "a", ""))
		l.reboot()
		l.put("10.1.2.2", "foreign\r\neth0")
		refused(l)
	})
	t.Run("clock set back", func(t *testing.T) {
		l := newLab(t, only)
		l.mustGive("other", "10.1.2.2/30")
		l.reboot()
		l.ok(l.call("DEL", "other", ""))
		l.mustGive("a", "10.1.2.2/30")
		l.setAge("10.1.2.2", longAgo) // the record still says that it lives
		refused(l)
	})
	t.Run("somebody answers", func(t *testing.T) {
		l := newLab(t, only)
		l.mustGive("other", "10.1.2.2/30")
		l.reboot()
		connect(t, "10.1.2.1/30", "10.1.2.2/30")
		refused(l)
	})
}

// connect makes a link to a pod that has an address beside that of the node.
func connect(t *testing.T, node, address string) {
	t.Helper()
	pod := kerneltest.NewPod(t)
	inside, err := os.Open(pod.Path)
	kerneltest.Must(t, err)
	defer inside.Close()
	up := func(name, address string) error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(address)
		return errors.Join(err, netlink.AddrAdd(link, addr), netlink.LinkSetUp(link))
	}
	runs := func(name string) bool {
		link, err := netlink.LinkByName(name)
		return err == nil && link.Attrs().OperState == netlink.OperUp
	}
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "probe0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(inside.Fd())}
	kerneltest.Must(t, netlink.LinkAdd(pair))
	t.Cleanup(func() { _ = netlink.LinkDel(pair) })
	kerneltest.Must(t, pod.Do(func() error { return up("eth0", address) }), up("probe0", node))
	kerneltest.Await(t, "both ends have a carrier", func() (both bool) {
		kerneltest.Must(t, pod.Do(func() error { both = runs("eth0"); return nil }))
		return both && runs("probe0")
	})
}

// routeTo adds a route through the link of connect.
func routeTo(t *testing.T, dst string) {
	t.Helper()
	link, err := netlink.LinkByName("probe0")
	kerneltest.Must(t, err)
	kerneltest.Must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: kernel.IPNet(netip.MustParsePrefix(dst))}))
}

// ADD skips an address that the node has itself, or to which it has a route of its own.
func TestForeignAddress(t *testing.T) {
	l := newLab(t, `"subnet":"10.1.2.0/24","gateway":"10.1.2.254"`)
	connect(t, "10.1.2.1/32", "10.9.9.9/32")
	routeTo(t, "10.1.2.2/32")
	l.mustGive("a", "10.1.2.3/24")
	for _, addr := range []string{"10.1.2.1", "10.1.2.2"} {
		l.mustFail(l.call("ADD", "b", `"runtimeConfig":{"ips":["`+addr+`"]}`), plugin.CodeAddressTaken, "the node has it or a route to it")
	}
}

// TestVFOfEarlierBoot: the lease of a VF is its pod's, whose record has another interface name, and is in the folder of the network without
// the suffix of a chained sriov. The clock was set back since. The ADD of the pod may still run, and its record may be damaged.
func TestVFOfEarlierBoot(t *testing.T) {
	for _, suffix := range []string{"", ipam.ChainedSuffix} {
		records := newLab(t, `"subnet":"10.1.2.0/30"`)
		l := records
		l.network, l.dir = l.network+suffix, l.dir+suffix
		l.ok(l.call("ADD", "x", ""))
		l.ok(l.call("DEL", "x", ""))
		l.reboot()
		l.put("10.1.2.2", "a\r\nnet1")
		l.setAge("10.1.2.2", longAgo)
		records.record("sriov", "a", map[string]any{"chained": suffix != "",
			"vfs": []map[string]any{{"name": "net1", "addresses": []string{"10.1.2.2/30"}}}})
		l.mustFail(l.call("ADD", "b", ""), plugin.CodeExhausted, "no IP addresses available")
		records.record("sriov", "a", map[string]any{"unfinished": true, "vfs": []map[string]any{{"name": "net1"}}})
		l.mustFail(l.call("ADD", "b", ""), plugin.CodeExhausted, "no IP addresses available")
		folder := filepath.Join(store.Root, records.network)
		found, err := filepath.Glob(folder + "/sriov-*")
		kerneltest.Must(t, err, os.WriteFile(found[0], []byte("{"), 0o600))
		l.mustFail(l.call("ADD", "b", ""), plugin.CodeExhausted, "no IP addresses available")
		kerneltest.Must(t, os.RemoveAll(folder))
		l.mustGive("b", "10.1.2.2/30")
	}
}

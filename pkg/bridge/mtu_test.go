// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/plugin"
)

// mtuLab returns a node with a network whose bridge no other test uses.
func mtuLab(t *testing.T, bridge, subnet string) lab {
	t.Helper()
	t.Cleanup(func() { _ = onHost(bridge, netlink.LinkDel) })
	return bareLab(t, "name", bridge, "bridge", bridge, "ipMasq", false, "ipam", hostLocal(subnet))
}

func (l lab) mustHaveMTU(want int) {
	l.Helper()
	bridge := l.Conf["bridge"].(string)
	if err := onHost(bridge, func(link netlink.Link) error {
		if got := link.Attrs().MTU; got != want {
			return fmt.Errorf("%s has MTU %d, want %d", bridge, got, want)
		}
		return nil
	}); err != nil {
		l.Error(err)
	}
}

func createForeignBridge(t *testing.T, bridge, address string) {
	t.Helper()
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridge}}); err != nil {
		t.Fatal(err)
	}
	if err := onHost(bridge, netlink.LinkSetUp); err != nil {
		t.Fatal(err)
	}
	if err := onHost(bridge, func(link netlink.Link) error {
		addr, err := netlink.ParseAddr(address)
		if err != nil {
			return err
		}
		return netlink.AddrAdd(link, addr)
	}); err != nil {
		t.Fatal(err)
	}
}

// TestSmallMTU: the bridge keeps its IPv6 addresses with a pod whose MTU is below the minimum of IPv6, even if its ADD fails.
func TestSmallMTU(t *testing.T) {
	l := bareLab(t, "name", "small", "bridge", "btsmall", "ipam", hostLocal("10.73.0.0/24", "fd00:73::/64"))
	t.Cleanup(func() { _ = onHost("btsmall", netlink.LinkDel) })
	a := l.add("a")
	l.Fails(l.other().Call("ADD", "b", "mtu", 1000), plugin.CodeConfig, "mtu 1000: IPv6 needs at least 1280")
	l.OK(a.check())
	c := l.other()
	l.OK(c.Call("ADD", "c", "mtu", 1000, "ipam", hostLocal("10.73.0.0/24")))
	l.OK(a.check())
	l.mustHaveMTU(1500)
	l.OK(c.Call("DEL", "c"))
	d := l.other()
	l.OK(d.Call("ADD", "d", "mtu", 1400))
	l.mustHaveMTU(1400)
	l.OK(d.Call("DEL", "d"))
}

// TestLargeMTU pins the largest possible MTU.
func TestLargeMTU(t *testing.T) {
	l := mtuLab(t, "btlarge", "10.74.3.0/24")
	l.add("a", "mtu", 65535)
	l.mustHaveMTU(65535)
}

// TestMTUOfOthers: another program's bridge, even in place of Podlace's, keeps its MTU and IPv6 addresses with any MTU of the pods.
func TestMTUOfOthers(t *testing.T) {
	l := mtuLab(t, "btother", "10.74.1.0/24")
	l.other().add("first")
	if err := onHost("btother", netlink.LinkDel); err != nil {
		t.Fatal(err)
	}
	createForeignBridge(t, "btother", "fd00:74:1::99/64")
	for _, mtu := range []int{1000, 1400, 1500, 9000} {
		l.other().add(fmt.Sprint("mtu", mtu), "mtu", mtu)
	}
	l.mustHaveMTU(1500)
	if err := onHost("btother", delAddress("fd00:74:1::99/64")); err != nil {
		t.Errorf("its address is gone: %v", err)
	}
}

// TestMTUOfAnotherNetwork: a bridge that another network's ADD created counts as Podlace's.
func TestMTUOfAnotherNetwork(t *testing.T) {
	l := mtuLab(t, "btnets", "10.74.4.0/24")
	l.add("a")
	l.mustHaveMTU(1500)
	l.other().add("b", "name", "btnets2", "mtu", 1400, "isGateway", false)
	l.mustHaveMTU(1400)
}

// TestMTUAtOnce: many concurrent ADDs leave the bridge's MTU unchanged, because each waits while another process changes an MTU.
func TestMTUAtOnce(t *testing.T) {
	l := mtuLab(t, "btonce", "10.74.2.0/24")
	createForeignBridge(t, "btonce", "fd00:74:2::99/64")
	set := func(mtu int) {
		t.Helper()
		if err := onHost("btonce", func(link netlink.Link) error { return netlink.LinkSetMTU(link, mtu) }); err != nil {
			t.Fatal(err)
		}
	}
	unlock, err := attachment.Waiting.Node(bridges)
	if err != nil {
		t.Fatal(err)
	}
	set(1501)
	var all sync.WaitGroup
	var ended atomic.Int32
	for i := range 12 {
		pod := l.other()
		all.Go(func() {
			if o := pod.Call("ADD", strconv.Itoa(i), "mtu", 1000); o.Exit != 0 {
				t.Errorf("%s", o.Stdout)
			}
			ended.Add(1)
		})
		t.Cleanup(func() { pod.OK(pod.Call("DEL", strconv.Itoa(i))) })
	}
	time.Sleep(300 * time.Millisecond)
	if n := ended.Load(); n > 0 {
		t.Errorf("%d pods did not wait", n)
	}
	set(1500)
	unlock()
	all.Wait()
	l.mustHaveMTU(1500)
}

// TestMTUAfterKill: if an ADD was killed after it created the bridge, the next ADD of any network pins the MTU, so that the kernel does not
// lower it to that of a port.
func TestMTUAfterKill(t *testing.T) {
	l := mtuLab(t, "btkill", "10.74.5.0/24")
	if err := l.host().AddBridge("btkill", randomMAC(), 1500, true, false); err != nil {
		t.Fatal(err)
	}
	l.add("a", "isGateway", false)
	if err := onHost("btkill", func(link netlink.Link) error {
		attrs := netlink.LinkAttrs{Name: "btkillp0", MTU: 1000, MasterIndex: link.Attrs().Index}
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "btkillp1"})
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = onHost("btkillp0", netlink.LinkDel) })
	l.mustHaveMTU(1500)
}

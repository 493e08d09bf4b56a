// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
)

// floodMACs sends frames from a pod, each with a new source MAC. The tests send more than Podlace's bridges learn.
func (a attached) floodMACs(frames int) {
	a.Helper()
	out, s := a.tap(), a.station()
	frame := udp4(net.HardwareAddr{2, 0, 0, 0, 0, 1}, s.mac, s.v4, netip.MustParseAddr("192.0.2.1"), 1, 2, "flood")
	for i := range frames {
		frame[6], frame[7] = 2, 0xfd
		binary.BigEndian.PutUint32(frame[8:], uint32(i))
		if _, err := unix.Write(out, frame); err != nil {
			a.Fatal(err)
		}
	}
}

// learnedMACs counts the MACs that a bridge has learned, or only the forged ones.
func (l lab) learnedMACs(bridge string, forged bool) (count int) {
	l.Helper()
	link, err := netlink.LinkByName(bridge)
	if err != nil {
		l.Fatal(err)
	}
	entries, err := netlink.NeighList(0, unix.AF_BRIDGE)
	if err != nil {
		l.Fatal(err)
	}
	for _, e := range entries {
		isForged := e.HardwareAddr[0] == 2 && e.HardwareAddr[1] == 0xfd
		if e.MasterIndex == link.Attrs().Index && e.State&unix.NUD_PERMANENT == 0 && (isForged || !forged) {
			count++
		}
	}
	return count
}

// maxLearned returns fdb_max_learned of a bridge, where 0 means no limit. ok is false if the kernel has no such limit.
func (l lab) maxLearned(bridge string) (bound uint32, ok bool) {
	l.Helper()
	req := nl.NewNetlinkRequest(unix.RTM_GETLINK, 0)
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(bridge)))
	replies, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	if err != nil || len(replies) != 1 {
		l.Fatalf("link show %s: %d answers, %v", bridge, len(replies), err)
	}
	value := replies[0][unix.SizeofIfInfomsg:]
	for _, kind := range []uint16{unix.IFLA_LINKINFO, nl.IFLA_INFO_DATA, 49} { // IFLA_BR_FDB_MAX_LEARNED
		attributes, err := nl.ParseRouteAttr(value)
		if err != nil {
			l.Fatal(err)
		}
		at := slices.IndexFunc(attributes, func(a syscall.NetlinkRouteAttr) bool { return a.Attr.Type&nl.NLA_TYPE_MASK == kind })
		if at < 0 {
			return 0, false
		}
		value = attributes[at].Value
	}
	return binary.NativeEndian.Uint32(value), true
}

func (l lab) setBridge(bridge string, attribute *nl.RtAttr) {
	l.Helper()
	link, err := netlink.LinkByName(bridge)
	if err != nil {
		l.Fatal(err)
	}
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(link.Attrs().Index)
	req.AddData(msg)
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("bridge"))
	info.AddRtAttr(nl.IFLA_INFO_DATA, nil).AddChild(attribute)
	req.AddData(info)
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		l.Fatal(err)
	}
}

// TestMACFlood: a bridge learns no more MACs than its limit from a pod that sends frames from many, and no forged ones with antiSpoof or
// macspoofchk. All other pods, also new ones and those whose MAC the bridge has forgotten, stay reachable.
func TestMACFlood(t *testing.T) {
	kerneltest.Slow(t)
	const frames = 5 * kernel.MaxLearned
	for name, c := range map[string]struct {
		keys []any
		most int // upper limit of forged MACs
	}{"nothing": {nil, kernel.MaxLearned}, "macspoofchk": {[]any{"macspoofchk", true}, 0}, "antiSpoof": {[]any{"antiSpoof", true}, 0}} {
		t.Run(name, func(t *testing.T) {
			l := bareLab(t, append([]any{"name", "macs", "bridge", "btmac"}, c.keys...)...)
			t.Cleanup(func() { _ = onHost("btmac", netlink.LinkDel) })
			attacker, a, b := l.add("m"), l.other().add("a"), l.other().add("b")
			bound, has := l.maxLearned("btmac")
			if has = kerneltest.Feature(t, has, "bound of learned MACs in bridges (fdb_max_learned)"); has && bound != kernel.MaxLearned {
				t.Errorf("the bridge learns up to %d MACs", bound)
			}
			bounded := has || c.most == 0
			talk := func(when string, a, b attached) {
				t.Helper()
				for _, ip := range b.result.IPs {
					if got, err := a.fetchAnswer(net.JoinHostPort(ip.Address.IP.String(), "80"), harness.TrafficLimit); got != b.id || err != nil {
						t.Errorf("%s: %s to %s: %q, %v", when, a.id, ip.Address.IP, got, err)
					}
				}
			}
			b.serve("tcp4", ":80")
			b.serve("tcp6", ":80")
			talk("before", a, b)
			attacker.floodMACs(frames)
			if n := l.learnedMACs("btmac", true); bounded && n > c.most {
				t.Errorf("the bridge learned %d forged MACs, want at most %d", n, c.most)
			}
			talk("known to the bridge", a, b)
			l.setBridge("btmac", nl.NewRtAttr(nl.IFLA_BR_FDB_FLUSH, nil)) // simulates ageing
			attacker.floodMACs(frames)
			talk("forgotten by the bridge", a, b)
			late := l.other().add("late")
			late.serve("tcp4", ":80")
			late.serve("tcp6", ":80")
			talk("added after the flood", a, late)
			talk("added after the flood", late, b)
			if n := l.learnedMACs("btmac", false); bounded && n > kernel.MaxLearned {
				t.Errorf("the bridge learned %d MACs, want at most %d", n, kernel.MaxLearned)
			}
		})
	}
}

// TestAdoptedBridgeKeepsItsBound: ADD keeps the learning limit of another program's bridge, and does not restore one that an admin removed
// from Podlace's bridge.
func TestAdoptedBridgeKeepsItsBound(t *testing.T) {
	l := bareLab(t, "name", "adopted", "bridge", "btadopt")
	t.Cleanup(func() { _ = onHost("btadopt", netlink.LinkDel) })
	keeps := func(want uint32) {
		t.Helper()
		if bound, has := l.maxLearned("btadopt"); has && bound != want {
			t.Errorf("the bridge learns up to %d MACs, want %d", bound, want)
		}
	}
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "btadopt"}}); err != nil {
		t.Fatal(err)
	}
	l.add("a")
	keeps(0)
	if err := onHost("btadopt", netlink.LinkDel); err != nil {
		t.Fatal(err)
	}
	l.other().add("b")
	keeps(kernel.MaxLearned)
	l.setBridge("btadopt", nl.NewRtAttr(49, nl.Uint32Attr(0)))
	l.other().add("c")
	keeps(0)
}

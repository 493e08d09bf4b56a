// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"encoding/binary"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// broadcastFrame returns a broadcast frame of the given total length, with these EtherTypes, those of VLAN tags first.
func broadcastFrame(length int, types ...uint16) []byte {
	out := []byte("\xff\xff\xff\xff\xff\xff\x02\x00\x00\x00\x00\x01")
	for i, t := range types {
		if i > 0 {
			out = append(out, 0, 7) // VLAN 7
		}
		out = binary.BigEndian.AppendUint16(out, t)
	}
	return append(out, make([]byte, length-len(out))...)
}

const experiment = 0x88b5 // IEEE 802 local experiments

// The egress limit covers every frame that a pod can send, for all lengths, VLAN tags and protocols (S-41).
func TestEveryFrameCounts(t *testing.T) {
	l := quietLab(t)
	l.OK(l.Call("ADD", "a", "runtimeConfig", limits(0, 1e9)))
	// with IPv6, the ifb device would send router solicitations
	l.must(os.WriteFile("/proc/sys/net/ipv6/conf/"+l.ifb("a")+"/disable_ipv6", []byte("1"), 0))
	multicast := broadcastFrame(62, unix.ETH_P_IPV6)
	copy(multicast, "\x33\x33\x00\x00\x00\x01")
	for what, c := range map[string]struct {
		frame []byte
		tag   int // bytes of the outer VLAN tag, which the kernel stores outside the frame
	}{
		"14 bytes":                    {broadcastFrame(14, experiment), 0},
		"15 bytes":                    {broadcastFrame(15, experiment), 0},
		"16 bytes":                    {broadcastFrame(16, experiment), 0},
		"17 bytes":                    {broadcastFrame(17, experiment), 0},
		"18 bytes":                    {broadcastFrame(18, experiment), 0},
		"60 bytes":                    {broadcastFrame(60, experiment), 0},
		"IPv4, 14 bytes":              {broadcastFrame(14, unix.ETH_P_IP), 0},
		"IPv6, 17 bytes":              {broadcastFrame(17, unix.ETH_P_IPV6), 0},
		"IPv6 multicast":              {multicast, 0},
		"ARP, 14 bytes":               {broadcastFrame(14, unix.ETH_P_ARP), 0},
		"a length in place of a type": {broadcastFrame(17, 3), 0},
		"type 0":                      {broadcastFrame(17, 0), 0},
		"VLAN tag, 20 bytes":          {broadcastFrame(20, unix.ETH_P_8021Q, experiment), 4},
		"VLAN tag, 21 bytes":          {broadcastFrame(21, unix.ETH_P_8021Q, experiment), 4},
		"VLAN tag, 64 bytes":          {broadcastFrame(64, unix.ETH_P_8021Q, experiment), 4},
		"802.1ad tag, 21 bytes":       {broadcastFrame(21, unix.ETH_P_8021AD, experiment), 4},
		"two tags, 24 bytes":          {broadcastFrame(24, unix.ETH_P_8021AD, unix.ETH_P_8021Q, experiment), 4},
		"MTU":                         {broadcastFrame(1414, experiment), 0},
		"MTU and a VLAN tag":          {broadcastFrame(1418, unix.ETH_P_8021Q, experiment), 4},
	} {
		const copies = 20
		counted := func() uint64 {
			buckets, err := l.host.Buckets()
			l.must(err)
			return buckets[l.link(l.ifb("a")).Index].Sent
		}
		before, want := counted(), uint64(copies*(len(c.frame)-c.tag))
		l.must(l.Pod.Do(func() error { return kerneltest.Send("eth0", c.frame, copies) }))
		got := counted() - before
		for end := time.Now().Add(time.Minute); got != want && time.Now().Before(end); got = counted() - before {
			time.Sleep(time.Millisecond)
		}
		if got != want {
			t.Errorf("%s: the limit counted %d of %d bytes", what, got, want)
		}
	}
	l.OK(l.Call("DEL", "a"))
}

// The egress rate holds for a pod that sends the shortest frames as fast as possible (S-41).
func TestShortFramesLimited(t *testing.T) {
	kerneltest.Slow(t)
	l := quietLab(t)
	out := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "bwout0"}, PeerName: "bwout1"}
	l.must(l.host.AddBridge("bwbr0", nil, 0, false, false), netlink.LinkAdd(out))
	t.Cleanup(func() { l.must(l.host.DelLink("bwout0"), l.host.DelLink("bwbr0")) })
	for _, name := range []string{"bwbr0", "bwout0", "bwout1"} {
		l.must(os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/disable_ipv6", []byte("1"), 0), l.host.SetUp(l.link(name)))
	}
	for _, name := range []string{"bwt0", "bwout0"} {
		l.must(l.host.SetMaster(l.link(name), l.link("bwbr0")))
	}
	passed := func() uint64 {
		link, err := netlink.LinkByName("bwout0")
		l.must(err)
		return link.Attrs().Statistics.TxBytes
	}
	probe := func() error { return kerneltest.Send("eth0", broadcastFrame(14, experiment), 1) }
	before := passed()
	for end := time.Now().Add(time.Minute); passed() == before; time.Sleep(time.Millisecond) {
		if l.must(l.Pod.Do(probe)); time.Now().After(end) {
			t.Fatal("the bridge forwards nothing")
		}
	}
	const rate = 1e6
	l.OK(l.Call("ADD", "a", "runtimeConfig", limits(0, rate)))
	bucket, _, err := l.host.Shaped(l.link(l.ifb("a")))
	before, began := passed(), time.Now()
	l.must(err, l.Pod.Do(func() error { return kerneltest.Send("eth0", broadcastFrame(14, experiment), 20_000) }))
	got := passed() - before
	if most := rate/8*time.Since(began).Seconds() + float64(bucket.Burst) + 14; float64(got) > 1.1*most {
		t.Errorf("%d bytes passed in %s, %.1f Mbit/s: want at most %.0f bytes", got, time.Since(began),
			float64(got)*8/1e6/time.Since(began).Seconds(), most)
	}
	l.OK(l.Call("DEL", "a"))
}

// passShortFrames replaces an attachment's redirect by one like the reference plugin's, which does not match short frames.
func (l lab) passShortFrames() {
	l.Helper()
	ifb := l.link(l.ifb("a"))
	l.must(l.host.DelRedirect(l.hostSide, ifb, false), netlink.FilterAdd(&netlink.U32{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: l.hostSide.Index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: 65535,
			Protocol: unix.ETH_P_ALL},
		ClassId: netlink.MakeHandle(1, 1), Actions: []netlink.Action{netlink.NewMirredAction(ifb.Index)},
	}))
}

// redirection returns which frames of the host side are redirected to the attachment's ifb device.
func (l lab) redirection() kernel.Redirection {
	l.Helper()
	have, err := l.host.Redirected(l.hostSide, l.link(l.ifb("a")))
	l.must(err)
	return have
}

// CHECK fails if the redirect ignores short frames; reload, ADD and an admin's change of the limits replace it.
func TestShortFramesRestored(t *testing.T) {
	for what, restore := range map[string]func(lab){
		"reload": func(l lab) { l.must(Restore(l.host, discard())) },
		"ADD":    func(l lab) { l.OK(l.Call("ADD", "a")) },
		"admin":  func(l lab) { l.must(l.set(nil, new(uint64(10e6)))) },
	} {
		t.Run(what, func(t *testing.T) {
			l := newLab(t)
			l.OK(l.Call("ADD", "a"))
			l.passShortFrames()
			l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, "lets frames shorter than 18 bytes pass the limit")
			if got := l.look().Egress.Missing; got == "" {
				t.Error("podlace limits says nothing")
			}
			restore(l)
			l.OK(l.Call("CHECK", "a"))
			filters, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: l.hostSide.Index}},
				netlink.HANDLE_MIN_INGRESS)
			if keys := keysOf(filters); err != nil || len(keys) != 1 || keys[0] != 0 {
				t.Errorf("keys of the filters: %v, %v", keys, err)
			}
			l.OK(l.Call("DEL", "a"))
			if got := l.applied("a"); got != none {
				t.Errorf("left %s", got)
			}
		})
	}
}

// keysOf returns, for each u32 filter with a selector, the number of its match keys.
func keysOf(filters []netlink.Filter) (keys []int) {
	for _, f := range filters {
		if u32, ok := f.(*netlink.U32); ok && u32.Sel != nil {
			keys = append(keys, len(u32.Sel.Keys))
		}
	}
	return keys
}

// CHECK fails if the device of an egress limit is down, also one of the reference plugin.
func TestReferenceDeviceDown(t *testing.T) {
	for what, recorded := range map[string]bool{"recorded": true, "without a record": false} {
		t.Run(what, func(t *testing.T) {
			l := newLab(t)
			l.OK(l.Call("ADD", "a"))
			l.passShortFrames()
			l.must(l.host.SetDown(l.link(l.ifb("a"))))
			if !recorded {
				l.removeRecord(l.key("a"))
			}
			l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, "is missing or down")
			l.OK(l.Call("DEL", "a"))
		})
	}
}

// Without a record, CHECK accepts the reference plugin's redirect, and 'podlace reload' replaces it. Neither plugin's DEL then leaves any
// state.
func TestReferenceRedirectReplaced(t *testing.T) {
	kerneltest.Slow(t)
	for what, del := range map[string]func(lab){
		"DEL":                  func(l lab) { l.OK(l.Call("DEL", "a")) },
		"DEL of the reference": func(l lab) { l.must(l.host.DelLink(l.ifb("a")), l.host.DelRedirect(l.hostSide, kernel.Link{}, true)) },
	} {
		t.Run(what, func(t *testing.T) {
			l := newLab(t)
			l.byReference()
			config := []any{"runtimeConfig", limits(0, 10e6)}
			l.OK(l.Call("CHECK", "a", config...))
			if got := l.redirection(); got != kernel.RedirectsLong {
				t.Errorf("before: %d", got)
			}
			for range 2 {
				l.must(Restore(l.host, discard()))
				if got := l.redirection(); got != kernel.RedirectsAll {
					t.Errorf("after reload: %d", got)
				}
				l.OK(l.Call("CHECK", "a", config...))
			}
			del(l)
		})
	}
}

// Reload keeps a redirect whose target is not the ifb device of a limit.
func TestOthersRedirectStays(t *testing.T) {
	l := newLab(t)
	ifb, err := l.host.EnsureIFB("mirror0", l.hostSide)
	l.must(err, netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.hostSide.Index, Handle: 0xffff0000,
		Parent: netlink.HANDLE_CLSACT}}),
		netlink.FilterAdd(&netlink.U32{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: l.hostSide.Index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: 1, Protocol: unix.ETH_P_ALL},
			ClassId:     netlink.MakeHandle(1, 1), Actions: []netlink.Action{netlink.NewMirredAction(ifb.Index)},
		}))
	l.must(Restore(l.host, discard()))
	if have, err := l.host.Redirected(l.hostSide, ifb); have != kernel.RedirectsLong || err != nil {
		t.Errorf("%d, %v", have, err)
	}
	l.must(l.host.DelRedirect(l.hostSide, ifb, true), l.host.DelLink("mirror0"))
}

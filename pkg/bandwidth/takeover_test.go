// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/kernel"
)

// byReference creates the same kernel objects for an egress limit as the reference plugin.
func (l lab) byReference() {
	l.Helper()
	ifb, err := l.host.EnsureIFB(l.ifb("a"), l.hostSide)
	const handle = 0xffff0000
	l.must(err, l.host.Shape(ifb, kernel.Bucket{Rate: 10e6, Burst: 20_000, Limit: 30_000}),
		netlink.QdiscAdd(&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.hostSide.Index, Handle: handle,
			Parent: netlink.HANDLE_INGRESS}}),
		netlink.FilterAdd(&netlink.U32{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: l.hostSide.Index, Parent: handle, Priority: 1, Protocol: unix.ETH_P_ALL},
			ClassId:     netlink.MakeHandle(1, 1), RedirIndex: ifb.Index,
			Actions: []netlink.Action{&netlink.MirredAction{MirredAction: netlink.TCA_EGRESS_REDIR, Ifindex: ifb.Index}},
		}))
}

// DEL removes an ifb device of the reference plugin together with the redirect to it, which would otherwise drop all packets that a live
// pod sends.
func TestTakenOver(t *testing.T) {
	for what, lift := range map[string]func(lab){
		"DEL without a record": func(l lab) { l.OK(l.Call("DEL", "a")) },
		"ADD, then DEL":        func(l lab) { l.OK(l.Call("ADD", "a")); l.OK(l.Call("DEL", "a")) },
		"ADD, then ADD without an egress limit": func(l lab) {
			l.OK(l.Call("ADD", "a"))
			l.OK(l.Call("CHECK", "a"))
			l.OK(l.Call("ADD", "a", "runtimeConfig", limits(20e6, 0)))
			l.OK(l.Call("DEL", "a"))
		},
		"ADD, then an admin": func(l lab) {
			l.OK(l.Call("ADD", "a"))
			l.must(l.set(nil, new(uint64(0))))
			l.OK(l.Call("DEL", "a"))
		},
	} {
		t.Run(what, func(t *testing.T) {
			l := newLab(t)
			l.byReference()
			lift(l)
			filters, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: l.hostSide.Index}},
				netlink.HANDLE_MIN_INGRESS)
			if _, ok, e := l.host.Link(l.ifb("a")); ok || len(filters) > 0 || err != nil || e != nil {
				t.Errorf("the device is left: %t; filters %v, %v, %v", ok, filters, err, e)
			}
		})
	}
}

// A live pod keeps its limits if a repeated ADD cannot change them.
func TestAddAgainFails(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a", "runtimeConfig", limits(20e6, 0)))
	file := "/run/podlace/net/bandwidth-" + l.key("a").Hash()
	before, err := os.ReadFile(file)
	l.must(err, l.host.AddBridge(l.ifb("a"), nil, 0, false, false)) // no ifb can take the name
	if o := l.Call("ADD", "a", "runtimeConfig", limits(5e6, 6e6)); o.Exit == 0 || !strings.Contains(o.Failure.Msg, "is no ifb") {
		t.Errorf("exit %d, %s", o.Exit, o.Stdout)
	}
	if got := l.applied("a"); got != "20000000/0 redirected false" {
		t.Errorf("left %s", got)
	}
	if now, err := os.ReadFile(file); err != nil || string(now) != string(before) {
		t.Errorf("record %s, was %s, %v", now, before, err)
	}
	l.OK(l.Call("DEL", "a"))
	l.must(l.host.DelLink(l.ifb("a")))
}

// DEL keeps the ifb device if the redirect to it cannot be removed.
func TestTakeAwayKeepsDevice(t *testing.T) {
	l := newLab(t)
	ifb, err := l.host.EnsureIFB(l.ifb("a"), l.hostSide)
	l.must(err)
	if err := deleteLimits(l.host, state{Link: strings.Repeat("x", 20), Index: l.hostSide.Index, IFB: ifb.Name}); err == nil {
		t.Error("a link can have that name")
	}
	if _, ok, err := l.host.Link(ifb.Name); !ok || err != nil {
		t.Errorf("the device is gone: %v", err)
	}
	l.must(l.host.DelLink(ifb.Name))
}

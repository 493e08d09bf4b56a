// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"errors"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// attack is a setup with two pods. The victim has limits. The tenant's eth0 is replaced by an interface with the ifindexes of the victim's
// link pair, which a tenant can choose, because each namespace has its own. The tenant's own pair is bwt1 on the host and real0 in the pod.
type attack struct{ victim, tenant lab }

// connectPair replaces the pod's link pair by one of the given kind. The pod's end keeps the ifindex that it had on the host, so different
// pods have different ones.
func (l *lab) connectPair(kind string) {
	l.Helper()
	name := l.hostSide.Name
	l.must(l.host.DelLink(name), kerneltest.ForgePair(kind, name, 0, "kt-moving", 0))
	netns, err := os.Open(l.Pod.Path)
	l.must(err)
	defer netns.Close()
	l.must(l.host.MoveLink(l.link("kt-moving"), netns, "eth0"))
	l.hostSide = l.link(name)
	l.must(l.host.SetUp(l.hostSide))
}

// prepare connects victim and tenant with pairs of the given kind. Only the victim gets limits.
func prepare(t *testing.T, kind string) (a attack, ok bool) {
	a = attack{victim: connectedAs(t, "bwt0"), tenant: connectedAs(t, "bwt1")}
	err := kerneltest.ForgePair(kind, "kt-probe0", 0, "kt-probe1", 0)
	if !kerneltest.Feature(t, !errors.Is(err, unix.EOPNOTSUPP), kind) {
		return a, false
	}
	a.victim.must(err, a.victim.host.DelLink("kt-probe0"))
	a.tenant.connectPair(kind)
	a.victim.connectPair(kind)
	a.victim.OK(a.victim.Call("ADD", "a"))
	a.unharmed("before")
	return a, true
}

// strike replaces the tenant's eth0 by an interface with the ifindexes of the victim's pair.
func (a attack) strike(kind string) {
	a.tenant.Helper()
	a.tenant.must(a.tenant.Pod.Do(func() error {
		own, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetName(own, "real0"),
			kerneltest.ForgePair(kind, "eth0", a.victim.hostSide.Peer, "q", a.victim.hostSide.Index))
	}))
}

func (a attack) unharmed(when string) {
	a.victim.Helper()
	if got := a.victim.applied("a"); got != "20000000/10000000 redirected true" {
		a.victim.Errorf("%s: the victim has %s", when, got)
	}
	a.victim.OK(a.victim.Call("CHECK", "a"))
}

// A tenant cannot affect another pod by giving its own interface the ifindexes of the other pod's link pair (C-50).
func TestForgedPeer(t *testing.T) {
	kerneltest.Slow(t)
	own, slow := limits(20e6, 10e6), limits(1000, 1000)
	reject := func(verb string, config object) func(attack) {
		return func(a attack) {
			a.tenant.Fails(a.tenant.Call(verb, "b", "runtimeConfig", config), plugin.CodeDevice,
				"interface eth0 has no veth or netkit peer on the node")
		}
	}
	for what, c := range map[string]struct {
		recorded bool // the tenant had limits before
		act      func(attack)
	}{
		"ADD":       {false, reject("ADD", slow)},
		"ADD again": {true, reject("ADD", slow)},
		"CHECK":     {true, reject("CHECK", own)},
		"CHECK without a record": {false, func(a attack) {
			a.tenant.Fails(a.tenant.Call("CHECK", "b", "runtimeConfig", limits(20e6, 0)), plugin.CodeDevice,
				"interface eth0 has no veth or netkit peer on the node")
		}},
		"DEL":                                   {true, func(a attack) { a.tenant.OK(a.tenant.Call("DEL", "b")) }},
		"DEL without a record":                  {false, func(a attack) { a.tenant.OK(a.tenant.Call("DEL", "b")) }},
		"DEL without a record and a prevResult": {false, func(a attack) { a.tenant.OK(a.tenant.Call("DEL", "b", "prevResult", nil)) }},
		"DEL, wrong configuration": {false,
			func(a attack) { a.tenant.OK(a.tenant.Call("DEL", "b", "runtimeConfig", limits(-1, 0))) }},
		"DEL, the name of the victim's device": {false, (attack).delSameName},
		"reload":                               {true, func(a attack) { a.tenant.must(Restore(a.tenant.host, discard())) }},
		"reload after the limits were lost":    {true, (attack).restoreLost},
		"an admin":                             {true, (attack).setByAdmin},
		"GC":                                   {true, (attack).collect},
		"DEL without a namespace, without record": {false, func(a attack) { a.tenant.OK(a.tenant.Call("DEL", "b", "CNI_NETNS", "")) }},
	} {
		for _, kind := range []string{"veth", "netkit"} {
			t.Run(what+"/"+kind, func(t *testing.T) {
				a, ok := prepare(t, kind)
				if !ok {
					return
				}
				if c.recorded {
					a.tenant.OK(a.tenant.Call("ADD", "b"))
				}
				a.strike(kind)
				c.act(a)
				if _, ok, err := a.victim.host.Link(a.victim.ifb("a")); what == "DEL, the name of the victim's device" {
					if !ok || err != nil {
						t.Errorf("the victim's device is gone: %v", err)
					}
				} else {
					a.unharmed("after")
				}
				a.tenant.OK(a.tenant.Call("DEL", "b"))
				a.victim.OK(a.victim.Call("DEL", "a"))
			})
		}
	}
}

// delSameName calls DEL for an attachment whose ifb device is named like the victim's, because network name and container ID concatenate to
// the same text.
func (a attack) delSameName() {
	a.victim.removeRecord(a.victim.key("a"))
	twin := a.tenant
	twin.Conf = twin.Conf.With("name", "ne")
	twin.OK(twin.Call("DEL", "ta", "prevResult", nil))
}

func (a attack) restoreLost() {
	host := a.tenant.host
	a.tenant.must(host.Unshape(a.tenant.hostSide), host.DelRedirect(a.tenant.hostSide, kernel.Link{}, true), host.DelLink(a.tenant.ifb("b")),
		Restore(host, discard()))
	if s, ok, err := host.Shaped(a.tenant.hostSide); !ok || s.Rate != 20e6 || err != nil {
		a.tenant.Errorf("the tenant has %s, %t, %v", s, ok, err)
	}
}

func (a attack) setByAdmin() {
	a.tenant.must(Set(a.tenant.host, a.tenant.key("b"), new(uint64(1000)), new(uint64(1000))))
	if s, ok, err := a.tenant.host.Shaped(a.tenant.hostSide); !ok || s.Rate != 1000 || err != nil {
		a.tenant.Errorf("the tenant has %s, %t, %v", s, ok, err)
	}
}

func (a attack) collect() {
	a.tenant.must(kerneltest.Age(kerneltest.StateDirs()...))
	a.tenant.OK(a.tenant.Call("GC", "", "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}))
	if _, ok, err := a.tenant.host.Shaped(a.tenant.hostSide); ok || err != nil {
		a.tenant.Errorf("the tenant's limit is left: %v", err)
	}
}

// If a tenant exchanges the names of its two interfaces, ADD and DEL for one do not change the limits of the other (C-50).
func TestExchangedNames(t *testing.T) {
	l := newLab(t)
	netns, err := os.Open(l.Pod.Path)
	l.must(err)
	defer netns.Close()
	_, err = l.host.AddVeth(kernel.Veth{Host: "bwt1", Pod: "net1", MTU: 1400, Netns: netns})
	l.must(err)
	defer func() { l.must(l.host.DelLink("bwt1")) }()
	l.OK(l.Call("ADD", "a"))
	exchange := func() error {
		var errs []error
		for _, names := range [][2]string{{"eth0", "x"}, {"net1", "eth0"}, {"x", "net1"}} {
			link, err := netlink.LinkByName(names[0])
			if errs = append(errs, err); err == nil {
				errs = append(errs, netlink.LinkSetName(link, names[1]))
			}
		}
		return errors.Join(errs...)
	}
	l.must(l.Pod.Do(exchange))
	second := []any{"CNI_IFNAME", "net1", "runtimeConfig", limits(1e9, 1e9), "prevResult", object{"cniVersion": "1.1.0", "interfaces": []any{
		object{"name": "bwt1"}, object{"name": "net1", "sandbox": l.Pod.Path}}}}
	l.Fails(l.Call("ADD", "a", second...), plugin.CodeDevice, "the host side of interface net1 is bwt0, and prevResult names bwt1")
	l.OK(l.Call("DEL", "a", second...))
	l.OK(l.Call("DEL", "a", append(second, "prevResult", nil)...))
	if got := l.applied("a"); got != "20000000/10000000 redirected true" {
		t.Errorf("eth0 has %s", got)
	}
	l.OK(l.Call("DEL", "a"))
	l.must(l.Pod.Do(exchange))
}

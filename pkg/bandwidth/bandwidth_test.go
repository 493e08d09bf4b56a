// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

const none = "0/0 redirected false"

// The ifb device has the name that the reference plugin gives it.
func TestIFBName(t *testing.T) {
	for ifname, want := range map[string]string{"eth0": "bwp46d35c6a9e0e", "net1": "bwpd954c4bcd4c8"} {
		if got := ifbName(attachment.Key{Network: "podlace", ContainerID: "0123456789abcdef", IfName: ifname}); got != want || len(got) != 15 {
			t.Errorf("%s: %s, want %s", ifname, got, want)
		}
	}
}

func TestAddCheckDel(t *testing.T) {
	for _, c := range []struct {
		config object
		want   string
	}{
		{limits(20e6, 10e6), "20000000/10000000 redirected true"},
		{limits(20e6, 0), "20000000/0 redirected false"},
		{limits(0, 10e6), "0/10000000 redirected true"},
		{limits(1e3, 1e11), "1000/100000000000 redirected true"},
		// the burst lasts a few ticks of the kernel's clock
		{object{"bandwidth": object{"ingressRate": 100_000_000_000, "ingressBurst": 50_400}}, "100000000000/0 redirected false"},
		{limits(0, 0), none},
	} {
		t.Run(c.want, func(t *testing.T) {
			l := newLab(t)
			l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, "the token bucket of bwt0 is missing")
			for range 2 { // a repeated ADD converges
				l.OK(l.Call("ADD", "a", "runtimeConfig", c.config))
				l.OK(l.Call("CHECK", "a", "runtimeConfig", c.config))
				if got := l.applied("a"); got != c.want {
					t.Errorf("%v: %s", c.config, got)
				}
			}
			for range 2 {
				l.OK(l.Call("DEL", "a", "runtimeConfig", nil, "prevResult", nil)) // with any current configuration
				if got := l.applied("a"); got != none {
					t.Errorf("%v: DEL left %s", c.config, got)
				}
			}
		})
	}
}

// ADD appends the ifb device to the result of the earlier plugins.
func TestResult(t *testing.T) {
	l := newLab(t)
	o := l.OK(l.Call("ADD", "a"))
	var result types100.Result
	l.must(json.Unmarshal(o.Stdout, &result))
	ifb := l.link(l.ifb("a"))
	want := []*types100.Interface{{Name: "bwt0"}, {Name: "eth0", Sandbox: l.Pod.Path}, {Name: ifb.Name, Mac: ifb.MAC.String(), Mtu: 1400}}
	if diff := cmp.Diff(want, result.Interfaces); diff != "" || !ifb.Up || ifb.MTU != 1400 {
		t.Errorf("%+v\n%s", ifb, diff)
	}
	l.OK(l.Call("DEL", "a"))
}

// A repeated ADD replaces the limits of the earlier one.
func TestAddAgainChanged(t *testing.T) {
	l := newLab(t)
	for _, c := range []struct {
		config object
		want   string
	}{{limits(20e6, 10e6), "20000000/10000000 redirected true"}, {limits(0, 30e6), "0/30000000 redirected true"},
		{limits(5e6, 0), "5000000/0 redirected false"},
		{limits(20e6, 10e6), "20000000/10000000 redirected true"}, {limits(0, 0), none}} {
		l.OK(l.Call("ADD", "a", "runtimeConfig", c.config))
		if got := l.applied("a"); got != c.want {
			t.Errorf("%v: %s, want %s", c.config, got, c.want)
		}
	}
}

// Another ADD of a live pod changes its limits in place instead of recreating them.
func TestChangedInPlace(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a"))
	before := l.link(l.ifb("a")).Index
	l.OK(l.Call("ADD", "a", "runtimeConfig", limits(0, 30e6)))
	if now := l.link(l.ifb("a")).Index; now != before {
		t.Error("the device was recreated")
	}
	l.OK(l.Call("CHECK", "a", "runtimeConfig", limits(0, 30e6)))
	l.OK(l.Call("DEL", "a"))
	if got := l.applied("a"); got != none {
		t.Errorf("left %s", got)
	}
}

// If another link replaced the pod's, ADD removes the old limits.
func TestMoved(t *testing.T) {
	l := connected(t)
	l.OK(l.Call("ADD", "a"))
	l.must(l.host.DelLink("bwt0"))
	netns, err := os.Open(l.Pod.Path)
	l.must(err)
	defer netns.Close()
	_, err = l.host.AddVeth(kernel.Veth{Host: "bwt0", Pod: "eth0", MTU: 1400, Netns: netns})
	l.must(err)
	l.OK(l.Call("ADD", "a", "runtimeConfig", limits(7e6, 0)))
	if got := l.applied("a"); got != "7000000/0 redirected false" {
		t.Errorf("got %s", got)
	}
	l.OK(l.Call("DEL", "a"))
}

// DEL leaves the limits to a main plugin whose DEL deletes the link and its device group in one request. Without a namespace path, that DEL
// would not delete the group, so this one removes the limits.
func TestDelWithGroup(t *testing.T) {
	l := newLab(t)
	l.must(l.host.SetUpLeader(l.hostSide, ""))
	l.hostSide = l.link("bwt0")
	l.OK(l.Call("ADD", "a"))
	l.OK(l.Call("DEL", "a"))
	if got := l.applied("a"); got == none {
		t.Error("DEL removed state that is deleted with the link")
	}
	l.OK(l.Call("ADD", "a", "runtimeConfig", limits(5e6, 6e6)))
	if got := l.applied("a"); got != "5000000/6000000 redirected true" {
		t.Errorf("ADD after DEL: %s", got)
	}
	l.OK(l.Call("DEL", "a", "CNI_NETNS", ""))
	if got := l.applied("a"); got != none {
		t.Errorf("left %s", got)
	}
	l.must(netlink.LinkSetGroup(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: l.hostSide.Index}}, 0))
}

// DEL does not change another program's link that took the recorded name.
func TestDelOfOther(t *testing.T) {
	l := connected(t)
	l.OK(l.Call("ADD", "a"))
	l.must(l.host.DelLink("bwt0"))
	pod := kerneltest.NewPod(t)
	netns, err := os.Open(pod.Path)
	l.must(err)
	defer netns.Close()
	_, err = l.host.AddVeth(kernel.Veth{Host: "bwt0", Pod: "eth0", MTU: 1400, Netns: netns})
	l.must(err)
	link := l.link("bwt0")
	l.must(l.host.SetUp(link), l.host.Shape(link, kernel.Bucket{Rate: 7e6, Burst: 20000, Limit: 20000}))
	l.OK(l.Call("DEL", "a"))
	if s, ok, err := l.host.Shaped(link); !ok || s.Rate != 7e6 || err != nil {
		t.Errorf("the limit of another is gone: %+v, %v", s, err)
	}
	if _, ok, _ := l.host.Link(l.ifb("a")); ok {
		t.Error("the device is left")
	}
}

// hasFairQueue reports whether the kernel supports fair queues.
func hasFairQueue(l lab) bool {
	has, err := l.host.HasFairQueue()
	l.must(err)
	return kerneltest.Feature(l, has, "fq_codel")
}

// Limits use fair queues if the kernel has them; CHECK expects the kind that ADD recorded.
func TestFairQueue(t *testing.T) {
	l := newLab(t)
	has := hasFairQueue(l)
	queues := func() (list []bool) {
		for _, link := range []kernel.Link{l.hostSide, l.link(l.ifb("a"))} {
			s, _, err := l.host.Shaped(link)
			l.must(err)
			list = append(list, s.Fair.Packets > 0)
		}
		return list
	}
	for range 2 { // the second ADD changes the limits in place
		l.OK(l.Call("ADD", "a"))
		l.OK(l.Call("CHECK", "a"))
		if !slices.Equal(queues(), []bool{has, has}) {
			t.Errorf("fair queues %t, fair %v", has, queues())
		}
	}
	l.OK(l.Call("DEL", "a"))
}

// CHECK fails after a change of any single part of the limits (C-64).
func TestCheckDetects(t *testing.T) {
	l := newLab(t)
	ifb := func() kernel.Link { return l.link(l.ifb("a")) }
	fair := hasFairQueue(l)
	ingress := kernel.Bucket{Rate: 20e6, Burst: 10000, Limit: 25000}
	if fair {
		ingress.Fair = Limit{Rate: 20e6}.bucket(1400, defaultLatency, true).Fair
	}
	changed := func(change func(*kernel.Bucket)) func() error {
		s := ingress
		change(&s)
		return func() error { return l.host.Shape(l.hostSide, s) }
	}
	for what, c := range map[string]struct {
		change func() error
		says   string
	}{
		"no ingress limit":    {func() error { return l.host.Unshape(l.hostSide) }, "the token bucket of bwt0 is missing"},
		"other ingress limit": {changed(func(s *kernel.Bucket) { s.Rate = 21e6 }), "the token bucket of bwt0 is"},
		"other burst":         {changed(func(s *kernel.Bucket) { s.Burst = 50000 }), "the token bucket of bwt0 is"},
		"other queue":         {changed(func(s *kernel.Bucket) { s.Limit = 25001 }), "the token bucket of bwt0 is"},
		"other fair queue": {changed(func(s *kernel.Bucket) {
			s.Fair = kernel.FairQueue{Target: time.Second, Interval: time.Second, Packets: 64}
		}), "the token bucket of bwt0 is"},
		"no fair queue": {func() error {
			return errors.Join(l.host.Unshape(l.hostSide), changed(func(s *kernel.Bucket) { s.Fair = kernel.FairQueue{} })())
		}, "the token bucket of bwt0 is"},
		"device down":     {func() error { return l.host.SetDown(ifb()) }, "is missing or down"},
		"device deleted":  {func() error { return l.host.DelLink(l.ifb("a")) }, "is missing or down"},
		"no egress limit": {func() error { return l.host.Unshape(ifb()) }, "the token bucket of " + l.ifb("a") + " is missing"},
		"no redirect": {func() error { return l.host.DelRedirect(l.hostSide, kernel.Link{}, true) },
			"the redirect from bwt0 to " + l.ifb("a") + " is missing"},
		"redirect elsewhere": {func() error { return l.host.Redirect(l.hostSide, l.hostSide) }, "the redirect from bwt0 to"},
	} {
		if strings.Contains(what, "fair") && !fair {
			continue
		}
		l.OK(l.Call("ADD", "a"))
		l.OK(l.Call("CHECK", "a"))
		if err := c.change(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, c.says)
		l.OK(l.Call("DEL", "a"))
	}
}

func TestRefused(t *testing.T) {
	l := newLab(t)
	l.Fails(l.Call("ADD", "a", "prevResult", nil), plugin.CodeConfig, "needs a prevResult")
	l.Fails(l.Call("ADD", "a", "CNI_IFNAME", "net1"), plugin.CodeDevice, "interface net1 is missing in the pod")
	l.Fails(l.Call("ADD", "a", "CNI_IFNAME", "lo"), plugin.CodeDevice, "interface lo has no veth or netkit peer on the node")
	l.Fails(l.Call("ADD", "a", "cniVersion", "0.2.0"), plugin.CodeVersion, "0.2.0")
	l.Fails(l.Call("STATUS", "", "runtimeConfig", object{"bandwidth": object{"ingressRate": -1}}), plugin.CodeConfig, "ingressRate -1")
	l.OK(l.Call("STATUS", ""))
	l.must(l.Pod.Do(func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "inner0"}, PeerName: "inner1"})
	}))
	// the peer of inner0 is in the pod
	l.Fails(l.Call("ADD", "a", "CNI_IFNAME", "inner0"), plugin.CodeDevice, "interface inner0 has no veth or netkit peer on the node")
	l.must(l.Pod.Do(func() error { return netlink.LinkDel(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "inner0"}}) }))
}

// Two interfaces of a container get different ifb devices.
func TestSecondInterface(t *testing.T) {
	l := newLab(t)
	netns, err := os.Open(l.Pod.Path)
	l.must(err)
	defer netns.Close()
	_, err = l.host.AddVeth(kernel.Veth{Host: "bwt1", Pod: "net1", Netns: netns})
	l.must(err)
	defer func() { l.must(l.host.DelLink("bwt1")) }()
	second := []any{"CNI_IFNAME", "net1", "runtimeConfig", limits(0, 3e6), "prevResult", object{"cniVersion": "1.1.0", "interfaces": []any{
		object{"name": "bwt1"}, object{"name": "net1", "sandbox": l.Pod.Path}}}}
	l.OK(l.Call("ADD", "a"))
	l.OK(l.Call("ADD", "a", second...))
	l.OK(l.Call("CHECK", "a"))
	l.OK(l.Call("CHECK", "a", second...))
	l.OK(l.Call("DEL", "a", "CNI_IFNAME", "net1"))
	l.OK(l.Call("CHECK", "a"))
	l.OK(l.Call("DEL", "a"))
}

// The host side of a netkit pair is found like that of a veth pair.
func TestNetkit(t *testing.T) {
	l := newLab(t)
	// the default policy in both namespaces lets all packets pass
	pair := &netlink.Netkit{LinkAttrs: netlink.LinkAttrs{Name: "bwk0"}, Mode: netlink.NETKIT_MODE_L3, Policy: netlink.NETKIT_POLICY_FORWARD,
		PeerPolicy: netlink.NETKIT_POLICY_FORWARD}
	pair.SetPeerAttrs(&netlink.LinkAttrs{Name: "bwk1"})
	err := netlink.LinkAdd(pair)
	if !kerneltest.Feature(t, !errors.Is(err, unix.EOPNOTSUPP), "netkit") {
		return
	}
	l.must(err)
	netns, err := os.Open(l.Pod.Path)
	l.must(err)
	defer netns.Close()
	l.must(netlink.LinkSetUp(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: l.link("bwk0").Index}}),
		netlink.LinkSetNsFd(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: l.link("bwk1").Index}}, int(netns.Fd())))
	t.Cleanup(func() { l.must(l.host.DelLink("bwk0")) })
	keys := []any{"CNI_IFNAME", "bwk1", "prevResult", object{"cniVersion": "1.1.0", "interfaces": []any{
		object{"name": "bwk0"}, object{"name": "bwk1", "sandbox": l.Pod.Path}}}}
	l.OK(l.Call("ADD", "a", keys...))
	l.OK(l.Call("CHECK", "a", keys...))
	if s, ok, err := l.host.Shaped(l.link("bwk0")); !ok || s.Rate != 20e6 || err != nil {
		t.Errorf("%+v, %t, %v", s, ok, err)
	}
	l.OK(l.Call("DEL", "a", keys...))
	if _, ok, err := l.host.Shaped(l.link("bwk0")); ok || err != nil {
		t.Errorf("left: %t, %v", ok, err)
	}
	key := attachment.Key{Network: "net", ContainerID: "a", IfName: "bwk1"}
	l.OK(l.Call("ADD", "a", keys...))
	l.removeRecord(key)
	l.OK(l.Call("DEL", "a", keys...))
	if _, ok, err := l.host.Link(ifbName(key)); ok || err != nil {
		t.Errorf("without a record the device is left: %v", err)
	}
}

func TestGC(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a"))
	l.must(kerneltest.Age(kerneltest.StateDirs()...))
	l.OK(l.Call("GC", "", "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}))
	l.OK(l.Call("CHECK", "a"))
	for range 2 {
		l.OK(l.Call("GC", "", "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "net1"}}))
		if got := l.applied("a"); got != none {
			t.Errorf("left %s", got)
		}
	}
}

// A burst below one full frame, with which no such frame could pass, is raised to 4 frames, and that is logged (S-14).
func TestTinyBurst(t *testing.T) {
	kerneltest.Slow(t)
	l := newLab(t)
	const least = 4 * (1400 + 18)
	for _, bits := range []int{1, 7, 8, 8 * 1000, 8*least - 8, 8 * least, 8 * 6000} {
		for _, keys := range [][]any{
			{"runtimeConfig", object{"bandwidth": object{"ingressRate": 1_000_000, "ingressBurst": bits, "egressRate": 1_000_000,
				"egressBurst": bits}}},
			{"ingressRate", 1_000_000, "ingressBurst", bits, "egressRate", 1_000_000, "egressBurst", bits},
		} {
			o := l.OK(l.Call("ADD", "a", keys...))
			for direction, link := range map[string]kernel.Link{"ingress": l.hostSide, "egress": l.link(l.ifb("a"))} {
				want := max(bits/8, least)
				if s, _, err := l.host.Shaped(link); err != nil || !nearBurst(s.Burst, uint32(want), s.Rate) {
					t.Errorf("%s, burst %d: %s, %v, want %d bytes", direction, bits, s, err, want)
				}
				says := fmt.Sprintf("direction=%s asked=%d applied=%d", direction, bits, 8*want)
				if strings.Contains(o.Log, says) != (bits/8 < least) {
					t.Errorf("burst %d: logged %q, want %q", bits, o.Log, says)
				}
			}
			l.OK(l.Call("CHECK", "a", keys...))
			l.OK(l.Call("DEL", "a", keys...))
		}
	}
}

// Bursts are in bits, in the configuration file as well as in the runtime's limits (C-111).
func TestStaticLimits(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a", "egressRate", 3000000, "egressBurst", 8000000))
	if got := l.applied("a"); got != "0/3000000 redirected true" {
		t.Errorf("got %s", got)
	}
	s, _, err := l.host.Shaped(l.link(l.ifb("a")))
	if err != nil || !nearBurst(s.Burst, 1e6, s.Rate) {
		t.Errorf("the burst of the configuration is not honoured: %+v, %v", s, err)
	}
	l.OK(l.Call("DEL", "a"))
}

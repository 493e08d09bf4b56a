// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/agent/noderoutes"
)

// TestProber: only a peer that is Ready and has answered during this boot can be silent. A round has at most 32 probes, and all peers get
// their turn.
func TestProber(t *testing.T) {
	list := newNodes(func() {}, slog.New(slog.DiscardHandler))
	var peers []PeerStatus
	for i := range 40 {
		name := fmt.Sprint("n", i)
		list.byName[name] = noderoutes.Node{Name: name, Boot: "1", Ready: true}
		peers = append(peers, PeerStatus{Name: name, State: noderoutes.Direct, PodCIDR: netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", i))})
	}
	peers = append(peers, PeerStatus{Name: "n0", State: noderoutes.Fabric, PodCIDR: netip.MustParsePrefix("10.245.0.0/24")})
	var mu sync.Mutex
	asked, up := map[string]int{}, map[string]bool{}
	p := newProber(list, slog.New(slog.DiscardHandler))
	p.ask = func(_ context.Context, addr netip.Addr) bool {
		mu.Lock()
		defer mu.Unlock()
		asked[addr.String()]++
		return up[addr.String()]
	}
	silent := func() (names []string) {
		for _, s := range p.mark(peers) {
			if s.State == noderoutes.Silent {
				names = append(names, s.Name)
			}
		}
		return names
	}
	rounds := func(n int) {
		for range n {
			clear(asked)
			p.round(t.Context())
			if len(asked) > probeRound || asked["10.245.0.1"] > 0 {
				t.Errorf("%d probes in a round: %v", len(asked), asked)
			}
		}
	}
	p.mark(peers)
	rounds(2)
	if got := silent(); len(got) > 0 {
		t.Errorf("silent before the first answer: %q", got)
	}
	for i := range 40 {
		up[fmt.Sprintf("10.244.%d.1", i)] = true
	}
	rounds(2)
	up["10.244.7.1"], up["10.244.39.1"] = false, false
	rounds(2)
	if got := silent(); !slices.Equal(got, []string{"n7", "n39"}) {
		t.Errorf("silent: %q, want n7 and n39", got)
	}
	list.byName["n7"] = noderoutes.Node{Name: "n7", Boot: "2", Ready: true}
	list.byName["n39"] = noderoutes.Node{Name: "n39", Boot: "1"}
	rounds(2)
	if got := silent(); len(got) > 0 || asked["10.244.39.1"] > 0 {
		t.Errorf("after a boot, or not Ready: %q silent, %v", got, asked)
	}
	list.byName["n39"] = noderoutes.Node{Name: "n39", Boot: "1", Ready: true}
	rounds(2)
	if got := silent(); !slices.Equal(got, []string{"n39"}) {
		t.Errorf("Ready again: %q silent, want n39", got)
	}
	up["10.244.39.1"] = true
	rounds(2)
	if got := silent(); len(got) > 0 {
		t.Errorf("all answer: %q silent", got)
	}
	up["10.244.39.1"] = false
	rounds(2)
	p.mark(peers[:39])
	if got := silent(); len(got) > 0 {
		t.Errorf("a deleted node is known: %q silent", got)
	}
}

// TestSilentPeer: the status, a problem with a remedy and the metric show a peer that answers no more.
func TestSilentPeer(t *testing.T) {
	l := newLab(t)
	l.HTTP, l.times.probe = "unix:"+l.dir+"/http", 10*time.Millisecond
	n2 := l.peer(2)
	n2.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	l.api.put(n2)
	gateways := func(change func(netlink.Link, *netlink.Addr) error) {
		t.Helper()
		kerneltest.Must(t, l.lan.Do(func() error {
			lo, err := netlink.LinkByName("lo")
			four, _ := netlink.ParseAddr("10.244.2.1/32")
			six, _ := netlink.ParseAddr("fd00:10:244:2::1/128")
			return errors.Join(err, netlink.LinkSetUp(lo), change(lo, four), change(lo, six))
		}))
	}
	answers := func() (list []string) {
		for _, p := range l.status().Peers {
			list = append(list, fmt.Sprint(p.Name, " ", p.State, " ", p.Answers))
		}
		return list
	}
	gateways(netlink.AddrAdd)
	l.ready()
	want := []string{"n2 direct yes", "n2 direct yes", "n3 direct ", "n3 direct ", "n9 refused "}
	l.await("n2 answers", func() bool { return slices.Equal(answers(), want) })
	gateways(netlink.AddrDel)
	want[0], want[1] = "n2 silent no", "n2 silent no"
	l.await("n2 is silent", func() bool { return slices.Equal(answers(), want) })
	if !l.says("node n2 fd00:10:244:2::/64", "silent: fd00:10:244:2::1 has answered before", "podlace doctor on n2") {
		t.Errorf("%+v", l.status().Problems)
	}
	l.awaitMetrics("silent", map[string]float64{`peers{state="silent"}`: 2, `peers{state="direct"}`: 2})
	gateways(netlink.AddrAdd)
	want[0], want[1] = "n2 direct yes", "n2 direct yes"
	l.await("n2 answers again", func() bool { return slices.Equal(answers(), want) })
}

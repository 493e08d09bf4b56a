// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/kernel/kerneltest"
	"github.com/podlace/podlace/pkg/meter"
)

// reaches reports an error unless an address answers, or unless it does not if want is false.
func (n labNode) reaches(to netip.Addr, want bool) {
	n.Helper()
	seen, err := meter.Ping(n.Context(), meter.Flow{From: n.pod.Do, Listen: netip.AddrPortFrom(to, 0), Duration: 5 * meter.PingInterval,
		Patience: time.Second})
	kerneltest.Must(n, err)
	if (seen.Lost < seen.Sent) != want {
		n.Errorf("%s: %d of %d answered", to, seen.Sent-seen.Lost, seen.Sent)
	}
}

// pingers is the number of parallel pings for 1,000 requests a second.
const pingers = int(time.Second/meter.PingInterval) / 10

// answers returns the number of echo replies that the node's kernel received. A socket that is read late may drop some.
func (n labNode) answers() (count int) {
	n.Helper()
	n.run(func() error {
		four, err := os.ReadFile("/proc/thread-self/net/snmp")
		if err != nil {
			return err
		}
		six, err := os.ReadFile("/proc/thread-self/net/snmp6")
		if err != nil {
			return err
		}
		var names []string
		for line := range strings.Lines(string(four)) {
			if !strings.HasPrefix(line, "Icmp:") {
				continue
			}
			if names == nil {
				names = strings.Fields(line)
				continue
			}
			count, err = strconv.Atoi(strings.Fields(line)[slices.Index(names, "InEchoReps")])
		}
		_, after, _ := strings.Cut(string(six), "Icmp6InEchoReplies")
		replies, errSix := strconv.Atoi(strings.Fields(after)[0])
		count += replies
		return errors.Join(err, errSix)
	})
	return count
}

// loses calls change repeatedly while 1,000 requests a second go to addresses. It returns the number of requests and of missing
// replies.
func (n labNode) loses(to []netip.Addr, lasts time.Duration, change func(round int)) (sent, lost, rounds int) {
	n.Helper()
	for _, addr := range to {
		n.reaches(addr, true) // resolves the neighbours beforehand
	}
	before, unread := n.answers(), 0
	ctx, stop := context.WithCancel(n.Context())
	defer stop()
	var mu sync.Mutex
	var running sync.WaitGroup
	for i := range pingers {
		running.Go(func() {
			time.Sleep(time.Duration(i) * meter.PingInterval / time.Duration(pingers))
			flow := meter.Flow{From: n.pod.Do, Listen: netip.AddrPortFrom(to[i%len(to)], 0), Duration: lasts}
			seen, err := meter.Ping(ctx, flow)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				n.Error(err)
			}
			sent, unread = sent+seen.Sent, unread+seen.Lost
		})
	}
	ended := make(chan struct{})
	go func() { running.Wait(); close(ended) }()
	for {
		select {
		case <-ended:
			lost = sent - (n.answers() - before)
			n.Logf("%d requests, %d lost, %d rounds; the pings saw %d lost", sent, lost, rounds, unread)
			return sent, lost, rounds
		default:
			change(rounds)
			rounds++
			time.Sleep(5 * time.Millisecond)
		}
	}
}

// TestNothingLost checks that no packet to an unchanged peer is lost while its nexthop ID changes, other peers come, go and change
// their addresses, and the same state is applied again.
func TestNothingLost(t *testing.T) {
	l := newLAN(t, 2)
	a := newNode(t).join(l, "eth0", 1)
	newNode(t).join(l, "eth0", 2).withPods(2)
	newNode(t).join(l, "eth0", 3, 30).withPods(3) // has two addresses
	same := a.monitor()
	// Each round differs in one thing from the one before.
	rounds := []func(*Wanted){
		func(w *Wanted) {},
		func(w *Wanted) { *w = a.direct(l, 2, 3, 4, 5) },
		func(w *Wanted) {
			w.Nexthops[2].Gateway, w.Nexthops[3].Gateway = l.address(30, false), l.address(30, true)
		},
		func(w *Wanted) {
			for i := range 2 {
				w.Nexthops[i].ID += 0x1000
				w.Routes[i].Nexthop += 0x1000
			}
		},
		func(w *Wanted) { *w = a.direct(l, 2, 3) },
	}
	want := a.direct(l, 2, 3)
	a.apply(want, Options{})
	to := []netip.Addr{podAddress(2, false), podAddress(2, true), podAddress(3, false), podAddress(3, true)}
	sent, lost, count := a.loses(to, 3*time.Second, func(round int) {
		rounds[round%len(rounds)](&want)
		a.apply(want, Options{})
		same()
		if r := a.apply(want, Options{}); r.Changes != 0 || same() != 0 {
			t.Errorf("round %d: applied again: %+v", round, r)
		}
	})
	if lost > 0 || sent < 2900 || count < len(rounds) {
		t.Errorf("%d of %d lost in %d rounds", lost, sent, count)
	}
}

// TestAdopt checks that routes of other programs are taken over without a lost packet, whatever their metric.
func TestAdopt(t *testing.T) {
	l := newLAN(t, 2)
	a := newNode(t).join(l, "eth0", 1)
	newNode(t).join(l, "eth0", 2).withPods(2)
	const flannel = 3
	for _, metric := range []int{0, 500, 5000} {
		theirs := func() error {
			err := route("eth0", "10.0.2.0/24", "192.0.2.2", flannel, metric)
			if err == nil {
				err = route("eth0", "fd10:2::/64", "fd00:2::2", flannel, metric)
			}
			return err
		}
		a.run(theirs)
		changed := a.monitor()
		sent, lost, _ := a.loses([]netip.Addr{podAddress(2, false), podAddress(2, true)}, time.Second, func(round int) {
			if r := a.apply(a.direct(l, 2), Options{Adopt: []int{flannel}}); (r.Changes != 0) != (round == 0) {
				t.Errorf("metric %d, round %d: %+v", metric, round, r)
			}
			// Two nexthop objects and two routes. Only routes with another metric are deleted.
			if seen := changed(); round == 0 && seen != map[bool]int{true: 4, false: 6}[metric == 0] {
				t.Errorf("metric %d: the kernel told of %d changes", metric, seen)
			}
		})
		if lost > 0 || sent < 900 {
			t.Errorf("metric %d: %d of %d lost", metric, lost, sent)
		}
		left, err := a.ns.ProtocolRoutes(flannel)
		if err != nil || len(left) > 0 {
			t.Errorf("metric %d: %d routes left, %v", metric, len(left), err)
		}
		_, err = Remove(a.ns)
		kerneltest.Must(t, err)
	}
}

// TestLossIsSeen checks that the measurement detects packets that are lost when a route is deleted and added.
func TestLossIsSeen(t *testing.T) {
	l := newLAN(t, 2)
	a := newNode(t).join(l, "eth0", 1)
	newNode(t).join(l, "eth0", 2).withPods(2)
	want := a.direct(l, 2)
	a.apply(want, Options{})
	_, lost, _ := a.loses([]netip.Addr{podAddress(2, false)}, time.Second, func(round int) {
		if a.answers() < 2*pingers {
			return // without a route, connecting the socket fails
		}
		kerneltest.Must(t, a.ns.DelProtocolRoute(kernel.ProtocolRoute{Dst: cidr(2, false)}, Protocol))
		time.Sleep(5 * time.Millisecond)
		a.apply(want, Options{})
	})
	if lost == 0 {
		t.Error("none")
	}
}

// setUp sets a link of the node up or down.
func (n labNode) setUp(link string, up bool) {
	n.Helper()
	n.run(func() error {
		if up {
			return netlink.LinkSetUp(mustLink(link))
		}
		return netlink.LinkSetDown(mustLink(link))
	})
}

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

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/meter"
)

// mustReach pings an address, and fails the test unless a reply comes exactly if want. The kernel drops frames for up to a second after a
// link comes up, so a reply has a minute.
func (n labNode) mustReach(to netip.Addr, want bool) {
	n.Helper()
	for until := time.Now().Add(time.Minute); ; {
		seen, err := meter.Ping(n.Context(), meter.Flow{From: n.pod.Do, Listen: netip.AddrPortFrom(to, 0), Duration: 5 * meter.PingInterval,
			Patience: time.Second})
		kerneltest.Must(n, err)
		if (seen.Lost < seen.Sent) == want {
			return
		}
		if !want || time.Now().After(until) {
			n.Errorf("%s: %d of %d answered", to, seen.Sent-seen.Lost, seen.Sent)
			return
		}
	}
}

// pingers is the number of parallel ping processes, which together send 1,000 requests per second.
const pingers = int(time.Second/meter.PingInterval) / 10

// repliesReceived returns how many echo replies the node's kernel received, with those dropped at a full socket buffer.
func (n labNode) repliesReceived() (count int) {
	n.Helper()
	n.runInside(func() error {
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

// measureLoss sends 1,000 ping requests per second while it repeatedly calls change, which changes the node. It returns the number of
// requests, of missing replies, and of calls.
func (n labNode) measureLoss(to []netip.Addr, lasts time.Duration, change func(round int)) (sent, lost, rounds int) {
	n.Helper()
	for _, addr := range to {
		n.mustReach(addr, true) // resolves the neighbours beforehand
	}
	before, unread := n.repliesReceived(), 0
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
			for end := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) { // replies may be late
				lost = sent - (n.repliesReceived() - before)
				if lost == 0 || time.Now().After(end) {
					break
				}
			}
			n.Logf("%d requests, %d lost, %d rounds; the pings saw %d lost", sent, lost, rounds, unread)
			return sent, lost, rounds
		default:
			change(rounds)
			rounds++
			time.Sleep(5 * time.Millisecond)
		}
	}
}

// TestMeasuredNothingLost: no packet to a peer is lost while its nexthop ID changes, others join, leave or change their addresses, and
// Apply also runs without a change.
func TestMeasuredNothingLost(t *testing.T) {
	l := newLAN(t, 2)
	a := newNode(t).joinLAN(l, "eth0", 1)
	newNode(t).joinLAN(l, "eth0", 2).withPods(2)
	newNode(t).joinLAN(l, "eth0", 3, 30).withPods(3) // has two addresses
	same := a.monitor()
	// Each function changes the wanted state that the previous one left.
	rounds := []func(*Wanted){
		func(w *Wanted) {},
		func(w *Wanted) { *w = a.directRoutes(l, 2, 3, 4, 5) },
		func(w *Wanted) {
			w.Nexthops[2].Gateway, w.Nexthops[3].Gateway = l.addressOf(30, false), l.addressOf(30, true)
		},
		func(w *Wanted) {
			for i := range 2 {
				w.Nexthops[i].ID += 0x1000
				w.Routes[i].Nexthop += 0x1000
			}
		},
		func(w *Wanted) { *w = a.directRoutes(l, 2, 3) },
	}
	want := a.directRoutes(l, 2, 3)
	a.mustApply(want, Options{})
	to := []netip.Addr{podAddress(2, false), podAddress(2, true), podAddress(3, false), podAddress(3, true)}
	sent, lost, count := a.measureLoss(to, 3*time.Second, func(round int) {
		rounds[round%len(rounds)](&want)
		a.mustApply(want, Options{})
		same()
		if r := a.mustApply(want, Options{}); r.Changes != 0 || same() != 0 {
			t.Errorf("round %d: applied again: %+v", round, r)
		}
	})
	if lost > 0 || sent < 2900 || count < len(rounds) {
		t.Errorf("%d of %d lost in %d rounds", lost, sent, count)
	}
}

// TestMeasuredAdopt: no packet is lost while Options.Adopt replaces another program's routes, with the same metric and with others.
func TestMeasuredAdopt(t *testing.T) {
	l := newLAN(t, 2)
	a := newNode(t).joinLAN(l, "eth0", 1)
	newNode(t).joinLAN(l, "eth0", 2).withPods(2)
	const flannel = 3
	for _, metric := range []int{0, 500, 5000} {
		theirs := func() error {
			err := addRoute("eth0", "10.0.2.0/24", "192.0.2.2", flannel, metric)
			if err == nil {
				err = addRoute("eth0", "fd10:2::/64", "fd00:2::2", flannel, metric)
			}
			return err
		}
		a.runInside(theirs)
		changed := a.monitor()
		sent, lost, _ := a.measureLoss([]netip.Addr{podAddress(2, false), podAddress(2, true)}, time.Second, func(round int) {
			if r := a.mustApply(a.directRoutes(l, 2), Options{Adopt: []int{flannel}}); (r.Changes != 0) != (round == 0) {
				t.Errorf("metric %d, round %d: %+v", metric, round, r)
			}
			// The first Apply adds two nexthop objects and two routes. It deletes the two old routes only if their metric is another one.
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

// TestMeasuredLossIsSeen: measureLoss sees packets that are lost while the peer's address is deleted and added again.
func TestMeasuredLossIsSeen(t *testing.T) {
	l := newLAN(t, 2)
	a := newNode(t).joinLAN(l, "eth0", 1)
	b := newNode(t).joinLAN(l, "eth0", 2).withPods(2)
	a.mustApply(a.directRoutes(l, 2), Options{})
	addr := &netlink.Addr{IPNet: netlink.NewIPNet(podAddress(2, false).AsSlice())}
	_, lost, _ := a.measureLoss([]netip.Addr{podAddress(2, false)}, time.Second, func(int) {
		b.runInside(func() error { return netlink.AddrDel(mustLink("lo"), addr) })
		time.Sleep(5 * time.Millisecond)
		b.runInside(func() error { return netlink.AddrAdd(mustLink("lo"), addr) })
	})
	if lost == 0 {
		t.Error("none")
	}
}

func (n labNode) setUp(link string, up bool) {
	n.Helper()
	n.runInside(func() error {
		if up {
			return netlink.LinkSetUp(mustLink(link))
		}
		return netlink.LinkSetDown(mustLink(link))
	})
}

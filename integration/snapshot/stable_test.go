// SPDX-License-Identifier: Apache-2.0

package snapshot_test

import (
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// connectedPods connects two pods, a node and a container, by a bridge and a veth, with both address families, a firewall and traffic
// shaping. It does not wait until the links are ready.
func connectedPods(t *testing.T) (node, pod *sandbox.Pod) {
	node, pod = unconnected(t)
	connect(t, pod)
	return node, pod
}

// connect sets the container's end of the veth up, which gives the node's end a carrier.
func connect(t *testing.T, pod *sandbox.Pod) {
	must(t, pod.Do(func() error { up(t, "v1"); addressOn(t, "v1", "10.8.0.2/24", "fd08::2/64"); return nil }))
}

func unconnected(t *testing.T) (node, pod *sandbox.Pod) {
	node, pod = kerneltest.NewPod(t), kerneltest.NewPod(t)
	must(t, node.Do(func() error {
		up(t, "lo")
		bridge(t)
		must(t, netlink.LinkSetMaster(get(t, "v0"), get(t, "br0")))
		moveTo(t, "v1", pod)
		up(t, "v0")
		up(t, "br0")
		addressOn(t, "br0", "10.8.0.1/24", "fd08::1/64")
		tbf(0, 10_000_000)(t)
		firewall(t)
		return nil
	}))
	return node, pod
}

func firewall(t *testing.T) {
	build(t)
	editWith(rule("counted", expr.VerdictAccept))(t)
	editWith(func(r *ruleset) error {
		r.AddObj(&nftables.QuotaObj{Table: r.table, Name: "quota", Bytes: 1 << 40})
		return r.SetAddElements(r.set, element("pod A"))
	})(t)
}

func moveTo(t *testing.T, link string, pod *sandbox.Pod) {
	fd, err := unix.Open(pod.Path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(fd)
	must(t, netlink.LinkSetNsFd(get(t, link), fd))
}

func addressOn(t *testing.T, link string, addrs ...string) {
	for _, a := range addrs {
		must(t, netlink.AddrAdd(get(t, link), &netlink.Addr{IPNet: prefix(t, a)}))
	}
}

func takeAll(t *testing.T, pods ...*sandbox.Pod) *snapshot.Snapshot {
	t.Helper()
	s, err := snapshot.Take(snapshot.Options{Pods: pods})
	must(t, err)
	return s
}

// Snapshots after a change are equal although the kernel still changes the carrier, link-local addresses, multicast groups and the state of
// duplicate address detection.
func TestStableWhileTheKernelSettles(t *testing.T) {
	node, pod := unconnected(t)
	first := takeAll(t, node)
	connect(t, pod)
	firstOfPod := takeAll(t, pod)
	for range 25 {
		time.Sleep(100 * time.Millisecond)
		now := takeAll(t, node, pod)
		if diff := append(snapshot.Diff(first, now), snapshot.Diff(firstOfPod, now)...); len(diff) > 0 {
			t.Fatalf("%q", diff)
		}
	}
}

// TestStableWithoutCarrier sets the peer of the node's only bridge port down, so that the port loses its carrier.
func TestStableWithoutCarrier(t *testing.T) {
	node, pod := connectedPods(t)
	time.Sleep(100 * time.Millisecond)
	before := takeAll(t, node)
	must(t, pod.Do(func() error { return netlink.LinkSetDown(get(t, "v1")) }))
	for range 12 {
		time.Sleep(100 * time.Millisecond)
		if diff := snapshot.Diff(before, takeAll(t, node)); len(diff) > 0 {
			t.Fatalf("%q", diff)
		}
	}
}

func TestStableUnderTraffic(t *testing.T) {
	node, pod := connectedPods(t)
	must(t, node.Do(func() error {
		must(t, netlink.LinkAdd(&netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "ifb0"}}))
		up(t, "ifb0")
		ingress(t)
		mirrorTo(unix.ETH_P_ALL, netlink.MakeHandle(0xffff, 0), "ifb0")(t)
		return nil
	}))
	before := takeAll(t, node, pod)
	must(t, pod.Do(func() error { return send("10.8.0.1:9", 50) }))
	must(t, node.Do(func() error { return send("10.8.0.2:9", 50) }))
	if diff := snapshot.Diff(before, takeAll(t, node, pod)); len(diff) > 0 {
		t.Errorf("%q", diff)
	}
}

// send sends datagrams whether or not a process listens.
func send(to string, n int) error {
	conn, err := net.Dial("udp", to)
	if err != nil {
		return err
	}
	defer conn.Close()
	for range n {
		_, _ = conn.Write(make([]byte, 100))
		time.Sleep(time.Millisecond)
	}
	return nil
}

// Snapshots are equal after all objects were removed and added again, with other indexes and handles.
func TestEqualAfterChurn(t *testing.T) {
	node, pod := connectedPods(t)
	time.Sleep(100 * time.Millisecond)
	before := takeAll(t, node, pod)
	for _, link := range []string{"w0", "w1", "w2"} { // deleting the last one may take a while
		other := kerneltest.NewPod(t)
		must(t, node.Do(func() error {
			must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: link}, PeerName: "v1"}))
			must(t, netlink.LinkSetMaster(get(t, link), get(t, "br0")))
			moveTo(t, "v1", other)
			up(t, link)
			editWith(func(r *ruleset) error {
				return r.SetAddElements(r.set, []nftables.SetElement{{Key: net.IP{10, 9, 9, 9}, Comment: "pod B"}})
			})(t)
			return nil
		}))
		if len(snapshot.Diff(before, takeAll(t, node, pod))) == 0 {
			t.Error("the snapshots show no change")
		}
		must(t, other.Close())
		must(t, node.Do(func() error {
			editWith(func(r *ruleset) error {
				return r.SetDeleteElements(r.set, []nftables.SetElement{{Key: net.IP{10, 9, 9, 9}}})
			})(t)
			must(t, netlink.QdiscDel(&netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index(t, "v0"), Parent: netlink.HANDLE_ROOT}}))
			tbf(0, 10_000_000)(t)
			editWith(func(r *ruleset) error { r.DelTable(r.table); return nil })(t)
			firewall(t)
			editWith(func(r *ruleset) error { // again in the same table
				r.FlushChain(r.chain)
				r.DelChain(r.chain)
				r.DelSet(r.set)
				r.DeleteObject(&nftables.QuotaObj{Table: r.table, Name: "quota"})
				return nil
			})(t)
			firewall(t)
			return nil
		}))
	}
	kerneltest.NoLeak(t, before, snapshot.Options{Pods: []*sandbox.Pod{node, pod}})
}

// TestTakeDuringChurn takes snapshots of tables that change all the time.
func TestTakeDuringChurn(t *testing.T) {
	node := kerneltest.NewPod(t)
	must(t, node.Do(func() error {
		build(t)
		for range 16 { // more than fits into one datagram
			editWith(func(r *ruleset) error {
				for range 50 {
					_ = rule("some rule", expr.VerdictAccept)(r)
				}
				return nil
			})(t)
		}
		return nil
	}))
	stop := make(chan struct{})
	var churn sync.WaitGroup
	churn.Go(func() {
		_ = node.Do(func() error {
			for {
				select {
				case <-stop:
					return nil
				default:
				}
				editWith(rule("extra", expr.VerdictAccept))(t)
				time.Sleep(5 * time.Millisecond)
			}
		})
	})
	for range 20 {
		if text := takeAll(t, node).String(); !strings.Contains(text, ` userdata "some rule" (800)`) {
			t.Error("a dump is not complete")
		}
	}
	close(stop)
	churn.Wait()
}

// TestPodThatDied: Diff ignores a dead pod, but it still compares the host.
func TestPodThatDied(t *testing.T) {
	pod := kerneltest.NewPod(t)
	before := takeAll(t, pod)
	must(t, pod.Close())
	must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "left"}}))
	defer func() { must(t, netlink.LinkDel(get(t, "left"))) }()
	if got := snapshot.Diff(before, takeAll(t, pod)); len(got) != 1 || got[0] != "host: link left appeared" {
		t.Errorf("got %q", got)
	}
}

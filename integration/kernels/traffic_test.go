// SPDX-License-Identifier: Apache-2.0

package kernels

import (
	"context"
	"net"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/meter"
)

// nodeAddresses returns the node's addresses of the conflist's families.
func (n *node) nodeAddresses() (list []netip.Addr) {
	for _, a := range n.web.addresses {
		if a.Is4() {
			list = append(list, netip.MustParseAddr(harness.NodeV4))
		} else {
			list = append(list, netip.MustParseAddr(harness.NodeV6))
		}
	}
	return list
}

// hostPorts connects to the hostPort of web from another machine, from the node, from another pod and from itself.
func (n *node) hostPorts(t *testing.T) {
	server, err := harness.Serve(n.web.Pod, 80)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	for _, address := range n.nodeAddresses() {
		target := net.JoinHostPort(address.String(), hostPort)
		harness.Reach(t, n.lan, target, n.web.Pod)
		harness.Reach(t, nil, target, n.web.Pod)
		harness.Reach(t, n.other.Pod, target, n.web.Pod)
		harness.Reach(t, n.web.Pod, target, n.web.Pod)
	}
	harness.Reach(t, nil, "127.0.0.1:"+hostPort, n.web.Pod)
}

// restore tests that STATUS and `podlace reload` restore hostPorts and spoof protection after a flush.
func (n *node) restore(t *testing.T) {
	server, err := harness.Serve(n.web.Pod, 80)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	target := net.JoinHostPort(harness.NodeV4, hostPort)
	for how, restore := range harness.InOrder(map[string]func(){
		"STATUS": func() { n.network.Must(t, "STATUS", nil) },
		"reload": func() { harness.Shell(t, filepath.Join(harness.BinDir(), "podlace")+" reload") },
	}) {
		harness.Shell(t, "nft flush ruleset")
		if _, err := harness.Dial(n.lan, target, harness.Patience(true)); err == nil {
			t.Fatal("the hostPort works without rules")
		}
		restore()
		if _, err := harness.Dial(n.lan, target, harness.TrafficLimit); err != nil {
			t.Errorf("hostPort after a flush and %s: %v", how, err)
		}
		n.guard(t)
		n.network.Must(t, "CHECK", n.web.rt)
	}
}

// frames sends a frame with a forged MAC between pods. Without spoof protection, it passes.
func (n *node) frames(t *testing.T) {
	protected := n.has("antiSpoof")
	err := harness.SendFrame(n.other.Pod, n.web.Pod, "eth0", harness.Patience(protected))
	switch {
	case protected && err == nil:
		t.Error("a frame with a forged MAC passed")
	case !protected && err != nil:
		t.Error(err)
	}
}

// guard sends from the pod other with an address that IPAM did not assign to it.
func (n *node) guard(t *testing.T) {
	t.Helper()
	n.frames(t)
	for i, to := range n.web.addresses {
		own := n.other.addresses[i]
		forged := own.Next().Next()
		harness.Shell(t, "ip -n "+n.other.Name+" addr add "+forged.String()+" dev eth0 $(case "+forged.String()+" in *:*) echo nodad;; esac)")
		if err := n.datagram(own, to, harness.TrafficLimit); err != nil {
			t.Errorf("a datagram from the pod's own address: %v", err)
		}
		if err := n.datagram(forged, to, harness.Patience(true)); err == nil {
			t.Errorf("a datagram from %s passed, which is not the pod's address", forged)
		}
		harness.Shell(t, "ip -n "+n.other.Name+" addr del "+forged.String()+" dev eth0")
	}
}

// datagram sends from the pod other to web.
func (n *node) datagram(from, to netip.Addr, limit time.Duration) error {
	var receiver, sender *net.UDPConn
	if err := harness.Networked(n.web.Pod, func() (err error) {
		receiver, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 0)))
		return err
	}); err != nil {
		return err
	}
	defer receiver.Close()
	if err := harness.Networked(n.other.Pod, func() (err error) {
		sender, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), receiver.LocalAddr().(*net.UDPAddr))
		return err
	}); err != nil {
		return err
	}
	defer sender.Close()
	if _, err := sender.Write([]byte("?")); err != nil {
		return err
	}
	_ = receiver.SetReadDeadline(time.Now().Add(limit))
	_, err := receiver.Read(make([]byte, 1))
	return err
}

// limits measures both directions of web, and one of other, which has no limit.
func (n *node) limits(t *testing.T) {
	if rates, _, err := harness.LimitsOf(n.web.peer); err != nil || rates != (harness.Rates{Ingress: limit / 1e6, Egress: limit / 1e6}) {
		t.Errorf("the kernel has limits of %+v Mbit/s, %v; want %d", rates, err, limit/1_000_000)
	}
	host := netip.MustParseAddr(harness.NodeV4)
	into, least := n.rate(t, meter.Here, n.web.Do, n.web.addresses[0])
	out, leastOut := n.rate(t, n.web.Do, meter.Here, host)
	free, _ := n.rate(t, meter.Here, n.other.Do, n.other.addresses[0])
	t.Logf("into the pod %.1f Mbit/s, out of it %.1f Mbit/s, without limits %.1f Mbit/s", into/1e6, out/1e6, free/1e6)
	const most = 1.1 * limit
	if least > most || leastOut > most {
		t.Errorf("into the pod %.1f Mbit/s, out of it %.1f Mbit/s: want at most %.1f", into/1e6, out/1e6, most/1e6)
	}
	if free < 2*limit {
		t.Errorf("without limits %.1f Mbit/s: too slow to test limits", free/1e6)
	}
}

// rate returns the rate of a TCP flow, and the lowest that the link may have had if the machine paused.
func (n *node) rate(t *testing.T, from, to meter.Place, address netip.Addr) (measured, least float64) {
	t.Helper()
	r, err := meter.Run(context.Background(), meter.Flow{Protocol: meter.TCP, From: from, To: to, Duration: 2 * time.Second,
		Listen: netip.AddrPortFrom(address, 5001), Patience: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	least, _ = r.Range(r.Mean.Wire, 0, r.Duration)
	return r.Mean.Wire, least
}

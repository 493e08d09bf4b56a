// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/meter"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// A second machine answers at lanPort with the address of its client, the node at nodePort.
const lanPort, nodePort = 7000, 7001

// A connection is an established TCP connection to an echo server.
type connection struct {
	net.Conn
	name string
}

// serveEcho starts a server at port 81 of a machine that returns what it receives. There is no keepalive, because a probe during a flush
// would pass without address translation and be answered by a reset.
func serveEcho(t testing.TB, on *sandbox.Pod) io.Closer {
	t.Helper()
	var l net.Listener
	quiet := net.ListenConfig{KeepAlive: -1}
	kerneltest.Must(t, harness.Networked(on, func() (err error) { l, err = quiet.Listen(t.Context(), "tcp", "[::]:81"); return err }))
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
		}
	}()
	return l
}

// alive sends a byte and waits for its echo.
func (c connection) alive() error {
	err := c.SetDeadline(time.Now().Add(harness.TrafficLimit))
	if err == nil {
		_, err = c.Write([]byte{'x'})
	}
	if err == nil {
		_, err = io.ReadFull(c, make([]byte, 1))
	}
	return err
}

// serve starts the second machine and its servers, and that of the node.
func (n *node) serve() {
	n.Helper()
	n.lan = harness.NewLAN(n.T)
	client, err := harness.ServeClientAddress(n.lan, lanPort)
	kerneltest.Must(n, err)
	own, err := harness.Speak(nil, fmt.Sprint("[::]:", nodePort))
	kerneltest.Must(n, err)
	echo := serveEcho(n, n.lan)
	n.Cleanup(func() { _ = errors.Join(client.Close(), own.Close(), echo.Close()) })
}

// connect opens connections of each pod: to its neighbour, to the second machine, and from there to the hostPort.
func (n *node) connect(pods []*pod) {
	n.Helper()
	for i, p := range pods {
		next := pods[(i+1)%len(pods)]
		for family, ip := range next.ips {
			p.dial(n, p.Pod, ip, 81)
			p.dial(n, p.Pod, []string{harness.LANV4, harness.LANV6}[family], 81)
			if p.port != 0 {
				p.dial(n, n.lan, []string{harness.NodeV4, harness.NodeV6}[family], p.port+1)
			}
		}
	}
}

func (p *pod) dial(t testing.TB, from *sandbox.Pod, address string, port int) {
	t.Helper()
	c := connection{name: fmt.Sprintf("%s -> %s port %d", harness.NameOf(from), address, port)}
	quiet := net.Dialer{Timeout: harness.TrafficLimit, KeepAlive: -1}
	kerneltest.Must(t, harness.Networked(from, func() (err error) {
		c.Conn, err = quiet.Dial("tcp", net.JoinHostPort(address, fmt.Sprint(port)))
		return err
	}))
	p.connections = append(p.connections, c)
}

// works runs CHECK of each pod, and checks that it has what it asked for.
func (n *node) works() {
	n.Helper()
	for _, p := range n.readable() {
		for _, a := range p.attachments {
			n.verb("CHECK", a.network, a.rt)
		}
	}
	n.serves()
}

// serves checks that each pod has what it asked for.
func (n *node) serves() {
	n.Helper()
	pods := n.readable()
	for i, p := range pods {
		other := pods[(i+1)%len(pods)]
		n.checkTraffic(p, other)
		n.checkHostPort(p, other)
		n.checkLimits(p)
		for _, c := range p.connections {
			if err := c.alive(); err != nil {
				n.wrong("the connection %s: %v", c.name, err)
			}
		}
	}
	n.measure(pods[0])
	if spoofs(n, pods[0]) {
		n.wrong("%s can send from an address that it does not have", pods[0].Name)
	}
}

// asks checks who answers at an address.
func (n *node) asks(from *sandbox.Pod, protocol, address string, port int, want string) {
	n.Helper()
	at := net.JoinHostPort(address, fmt.Sprint(port))
	got, err := harness.Ask(from, protocol, at, harness.TrafficLimit)
	if err != nil || got != want {
		n.wrong("%s %s -> %s: %q answers, %v; want %q", protocol, harness.NameOf(from), at, got, err, want)
	}
}

// checkTraffic checks a pod's traffic with the node, with another pod and with the second machine, which sees the node's address.
func (n *node) checkTraffic(p, other *pod) {
	n.Helper()
	for family, ip := range p.ips {
		n.asks(nil, "tcp", ip, 80, p.Name)
		n.asks(other.Pod, "udp", ip, 80, p.Name)
		n.asks(p.Pod, "tcp", other.ips[family], 80, other.Name)
		n.asks(p.Pod, "udp", []string{"10.58.0.1", "fd00:58::1"}[family], nodePort, "host")
		n.asks(p.Pod, "tcp", []string{harness.LANV4, harness.LANV6}[family], lanPort, []string{harness.NodeV4, harness.NodeV6}[family])
	}
	if p.side != "" && other.side != "" {
		n.asks(p.Pod, "tcp", other.side, 80, other.Name)
	}
}

// checkHostPort checks the hostPort of a pod from the second machine, from the node and from another pod.
func (n *node) checkHostPort(p, other *pod) {
	n.Helper()
	if p.port == 0 {
		return
	}
	for _, address := range []string{harness.NodeV4, harness.NodeV6} {
		n.asks(n.lan, "tcp", address, p.port, p.Name)
		n.asks(n.lan, "udp", address, p.port, p.Name)
		n.asks(other.Pod, "tcp", address, p.port, p.Name)
	}
	n.asks(nil, "tcp", "127.0.0.1", p.port, p.Name)
}

// checkLimits compares the limits of the kernel with those of the pod.
func (n *node) checkLimits(p *pod) {
	n.Helper()
	got, device, err := harness.LimitsOf(p.attachments[0].key().HostVeth())
	if err != nil || got != p.limits || (device != "") != (p.limits.Egress > 0) {
		n.wrong("%s has the limits %+v by %q, %v; want %+v", p.Name, got, device, err, p.limits)
	}
}

// measure checks by traffic that a pod with both limits gets no more.
func (n *node) measure(p *pod) {
	n.Helper()
	for what, c := range map[string]struct {
		flow meter.Flow
		mbit int
	}{
		"receives": {meter.Flow{To: p.Do, Listen: netip.AddrPortFrom(netip.MustParseAddr(p.ips[0]), 0)}, p.limits.Ingress},
		"sends":    {meter.Flow{From: p.Do, Listen: netip.MustParseAddrPort("10.58.0.1:0")}, p.limits.Egress},
	} {
		c.flow.Protocol, c.flow.Duration, c.flow.Rate = meter.UDP, time.Second/2, 3e6*float64(c.mbit)
		r, err := meter.Run(n.Context(), c.flow)
		if got := r.Mean.Wire / 1e6; err != nil || got <= 0 || got > 1.2*float64(c.mbit) {
			n.wrong("%s %s %.2f Mbit/s, %v; want at most %d", p.Name, what, got, err, c.mbit)
		}
	}
}

// spoofs reports whether the node answers a pod that sends from an address that no pod has.
func spoofs(t testing.TB, p *pod) bool {
	t.Helper()
	const stolen = "10.58.200.200"
	harness.Shell(t, fmt.Sprintf("ip -n %s addr add %s/32 dev eth0", p.Name, stolen))
	defer harness.Shell(t, fmt.Sprintf("ip -n %s addr del %s/32 dev eth0", p.Name, stolen))
	var c net.Conn
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(stolen)}, Timeout: harness.Patience(true)}
	err := harness.Networked(p.Pod, func() (err error) { c, err = d.Dial("tcp", fmt.Sprint("10.58.0.1:", nodePort)); return err })
	if err == nil {
		_ = c.Close()
	}
	return err == nil
}

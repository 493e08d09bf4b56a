// SPDX-License-Identifier: Apache-2.0

package cri

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/meter"
)

const mbit = 1_000_000

var (
	node4     = netip.MustParseAddr("192.0.2.1")
	node6     = netip.MustParseAddr("2001:db8::1")
	localhost = netip.MustParseAddr("127.0.0.1")
)

// HostPorts says whether a hostPort is also reachable through 127.0.0.1 and from its own pod, which depends on whether portmap or CRI-O
// maps it. The node, other machines and other pods always reach it.
type HostPorts struct {
	Localhost bool // by 127.0.0.1
	Itself    bool // from the pod that has the port
}

// Suite runs, as subtests, the tests that all container runtimes must pass.
func Suite(t *testing.T, socket string, ports HostPorts) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, Client)
	}{
		{"Status", testStatus}, {"Traffic", func(t *testing.T, c Client) { testTraffic(t, c, ports) }}, {"Loopback", testLoopback},
		{"Masquerade", testMasquerade}, {"Bandwidth", testBandwidth}, {"Sequence", testSequence}, {"StopTwice", testStopTwice},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, Open(t, socket)) })
	}
}

// testStatus: the runtime reports the node as ready before, during and after a pod's life, and the network only if STATUS of the plugins
// succeeds.
func testStatus(t *testing.T, c Client) {
	t.Helper()
	ExpectReady(t, c)
	p := RunPod(t, c, "status")
	ExpectReady(t, c)
	p.Remove()
	ExpectReady(t, c)
}

// ExpectReady fails the test unless the runtime and its network are ready.
func ExpectReady(t *testing.T, c Client) {
	t.Helper()
	if err := c.Ready(t.Context()); err != nil {
		t.Error(err)
	}
}

// testTraffic: pods reach each other, and the node, other machines and other pods reach a hostPort, with and without bridge netfilter, in
// which nodes differ. ports says whether 127.0.0.1 and its own pod must also reach it.
func testTraffic(t *testing.T, c Client, ports HostPorts) {
	t.Helper()
	for _, value := range []string{"1", "0"} {
		t.Run("bridge-nf-call="+value, func(t *testing.T) {
			setBridgeCalls(t, value)
			const port = 18080
			web := RunPod(t, c, "web", HostPort(port), Limits("200M", "200M"))
			shop := RunPod(t, c, "shop")
			on4, on6 := netip.AddrPortFrom(node4, port), netip.AddrPortFrom(node6, port)
			for _, p := range []struct {
				netns   string
				to      netip.AddrPort
				answers bool
			}{
				{"", on4, true}, {"", on6, true}, {OutsideNetns, on4, true}, {OutsideNetns, on6, true},
				{shop.Netns, on4, true}, {shop.Netns, on6, true},
				{"", netip.AddrPortFrom(localhost, port), ports.Localhost}, {web.Netns, on4, ports.Itself}, {web.Netns, on6, ports.Itself},
				{shop.Netns, web.At(web.V4), true}, {shop.Netns, web.At(web.V6), true}, {web.Netns, web.At(web.V4), true},
			} {
				if p.answers {
					web.Serves(p.netns, p.to)
				} else {
					web.Ignores(p.netns, p.to)
				}
			}
			if got := shop.Fetch("http://" + on4.String() + "/"); got != "web" {
				t.Errorf("a container of pod shop: GET %s: %q: want web", on4, got)
			}
		})
	}
}

// setBridgeCalls sets bridge-nf-call-iptables and bridge-nf-call-ip6tables until the end of the test. A node without br_netfilter behaves
// as if both were 0.
func setBridgeCalls(t *testing.T, value string) {
	t.Helper()
	for _, name := range []string{"iptables", "ip6tables"} {
		path := "/proc/sys/net/bridge/bridge-nf-call-" + name
		before, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) && value == "0" {
			return
		}
		if errors.Is(err, fs.ErrNotExist) {
			t.Skip("SKIP: the kernel has no br_netfilter loaded")
		}
		if err := errors.Join(err, os.WriteFile(path, []byte(value), 0)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.WriteFile(path, before, 0); err != nil {
				t.Error(err)
			}
		})
	}
}

// testLoopback: the pod reaches itself through 127.0.0.1 and ::1. The runtime calls loopback and the pod network's plugins in parallel.
func testLoopback(t *testing.T, c Client) {
	t.Helper()
	p := RunPod(t, c, "lo")
	for _, url := range []string{"http://127.0.0.1:8080/", "http://[::1]:8080/"} {
		if got := p.Fetch(url); got != "lo" {
			t.Errorf("GET %s in the pod: %q: want lo", url, got)
		}
	}
	if out := p.Exec("ip", "-o", "link"); strings.Count(out, "\n") != 2 || !strings.Contains(out, "eth0") {
		t.Errorf("links of the pod: want lo and eth0:\n%s", out)
	}
}

// testMasquerade: packets of a sandbox and of its container reach another machine from the node's addresses.
func testMasquerade(t *testing.T, c Client) {
	t.Helper()
	p := RunPod(t, c, "client")
	if err := p.SeenAsNode(); err != nil {
		t.Error(err)
	}
	url := ServeAddress(t, OutsideNetns, node6.Next())
	if got, err := netip.ParseAddrPort(p.Fetch(url)); err != nil || got.Addr() != node6 {
		t.Errorf("%s sees a container of the pod as %v, %v: want %v", url, got, err, node6)
	}
}

// testBandwidth measures at the receiver the mean rate and that of the first second, in which alone a burst occurs.
func testBandwidth(t *testing.T, c Client) {
	t.Helper()
	const port, sink = 18082, 9000
	p := RunPod(t, c, "limited", MapPort(port, sink), Limits("20M", "10M"))
	outside := node4.Next()
	expectLimit(t, "from outside through the hostPort", 20*mbit, meter.Flow{
		From:   Place(OutsideNetns),
		To:     Place(p.Netns),
		Listen: netip.AddrPortFrom(p.V4, sink),
		Dial:   netip.AddrPortFrom(node4, port),
	})
	expectLimit(t, "from the node to the pod's IPv6 address", 20*mbit, meter.Flow{
		To:     Place(p.Netns),
		Listen: netip.AddrPortFrom(p.V6, sink),
	})
	expectLimit(t, "from the pod to the outside", 10*mbit, meter.Flow{
		From:   Place(p.Netns),
		To:     Place(OutsideNetns),
		Listen: netip.AddrPortFrom(outside, sink),
	})
}

func expectLimit(t *testing.T, what string, limit float64, flow meter.Flow) {
	t.Helper()
	flow.Protocol, flow.Duration = meter.TCP, 2500*time.Millisecond
	r, err := meter.Run(t.Context(), flow)
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	mean, first := r.Mean.Wire/mbit, r.FirstSecond.Wire/mbit
	t.Logf("%s: limit %.0f Mbit/s, mean %.1f, first second %.1f", what, limit/mbit, mean, first)
	if mean > 1.2*limit/mbit || first > 1.2*limit/mbit {
		t.Errorf("%s: mean %.1f Mbit/s, first second %.1f: want at most 1.2 x %.0f", what, mean, first, limit/mbit)
	}
	if mean < 0.5*limit/mbit {
		t.Errorf("%s: mean %.1f Mbit/s: want about %.0f", what, mean, limit/mbit)
	}
}

// testSequence runs several pods one after another with the same hostPort.
func testSequence(t *testing.T, c Client) {
	t.Helper()
	const port = 18083
	for i := range 3 {
		p := RunPod(t, c, "seq-"+strconv.Itoa(i), HostPort(port), Limits("100M", "100M"))
		p.Serves("", netip.AddrPortFrom(node4, port))
		p.Remove()
	}
}

func testStopTwice(t *testing.T, c Client) {
	t.Helper()
	p := RunPod(t, c, "twice", HostPort(18084), Limits("100M", "100M"))
	p.Stop()
	p.Stop()
	p.Remove()
}

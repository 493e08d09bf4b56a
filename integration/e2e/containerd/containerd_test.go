// SPDX-License-Identifier: Apache-2.0

package containerd_test

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/meter"
)

const mbit = 1_000_000

var (
	node4     = netip.MustParseAddr("192.0.2.1")
	node6     = netip.MustParseAddr("2001:db8::1")
	localhost = netip.MustParseAddr("127.0.0.1")
)

// TestStatus: the node is ready, whatever STATUS of the plugins looks at,
// before, with and after a pod.
func TestStatus(t *testing.T) {
	c := openRuntime(t)
	expectReady(t, c)
	p := runPod(t, c, "status")
	expectReady(t, c)
	p.remove()
	expectReady(t, c)
}

func expectReady(t *testing.T, c runtimeClient) {
	t.Helper()
	if err := c.ready(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestTraffic: a hostPort answers the node, localhost, the outside, other pods
// and the pod itself, whether or not bridged packets pass the rules for routed
// ones, which nodes differ in.
func TestTraffic(t *testing.T) {
	for _, value := range []string{"1", "0"} {
		t.Run("bridge-nf-call="+value, func(t *testing.T) {
			c := openRuntime(t)
			setBridgeCalls(t, value)
			const port = 18080
			web := runPod(t, c, "web", hostPort(port), limits("200M", "200M"))
			shop := runPod(t, c, "shop")
			expectHostPort(t, web, port)
			for _, from := range []*pod{shop, web} {
				expectFromPod(t, from, web, port)
			}
		})
	}
}

// setBridgeCalls switches br_netfilter of the node for the time of the test.
// Without br_netfilter the node is as with "0".
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

// expectHostPort asks the node's port from the node and from outside.
func expectHostPort(t *testing.T, web *pod, port uint16) {
	t.Helper()
	web.serves("", netip.AddrPortFrom(node4, port))
	web.serves("", netip.AddrPortFrom(node6, port))
	web.serves("", netip.AddrPortFrom(localhost, port))
	web.serves(outsideNetns, netip.AddrPortFrom(node4, port))
	web.serves(outsideNetns, netip.AddrPortFrom(node6, port))
}

// expectFromPod asks the node's port and the pod's own from a pod.
func expectFromPod(t *testing.T, from, web *pod, port uint16) {
	t.Helper()
	for _, at := range []netip.AddrPort{
		netip.AddrPortFrom(node4, port),
		netip.AddrPortFrom(node6, port),
		netip.AddrPortFrom(web.v4, httpPort),
		netip.AddrPortFrom(web.v6, httpPort),
	} {
		if got := from.fetch("http://" + at.String() + "/"); got != "web" {
			t.Errorf("pod %s: GET %s: %q: want web", from.config.Metadata.Name, at, got)
		}
	}
}

// TestLoopback: the runtime calls loopback at the same time as the pod network.
func TestLoopback(t *testing.T) {
	c := openRuntime(t)
	p := runPod(t, c, "lo")
	for _, url := range []string{"http://127.0.0.1:8080/", "http://[::1]:8080/"} {
		if got := p.fetch(url); got != "lo" {
			t.Errorf("GET %s in the pod: %q: want lo", url, got)
		}
	}
	if out := p.exec("ip", "-o", "link"); strings.Count(out, "\n") != 2 || !strings.Contains(out, "eth0") {
		t.Errorf("links of the pod: want lo and eth0:\n%s", out)
	}
}

// TestMasquerade: what lies outside the node sees the node's address.
func TestMasquerade(t *testing.T) {
	c := openRuntime(t)
	p := runPod(t, c, "client")
	for _, want := range []netip.Addr{node4, node6} {
		server := want.Next() // the other end of the node's link
		url := serveAddress(t, outsideNetns, server)
		got, err := netip.ParseAddrPort(p.fetch(url))
		if err != nil || got.Addr() != want {
			t.Errorf("%s sees the pod as %v, %v: want %v", server, got, err, want)
		}
	}
}

// TestBandwidth measures where the bytes arrive: the mean and the first second
// alike, because a burst spoils only the latter.
func TestBandwidth(t *testing.T) {
	c := openRuntime(t)
	const port, sink = 18082, 9000
	p := runPod(t, c, "limited", mapPort(port, sink), limits("20M", "10M"))
	outside := node4.Next()
	expectLimit(t, "from outside through the hostPort", 20*mbit, meter.Flow{
		From:   place(outsideNetns),
		To:     place(p.netns),
		Listen: netip.AddrPortFrom(p.v4, sink),
		Dial:   netip.AddrPortFrom(node4, port),
	})
	expectLimit(t, "from the node to the pod's IPv6 address", 20*mbit, meter.Flow{
		To:     place(p.netns),
		Listen: netip.AddrPortFrom(p.v6, sink),
	})
	expectLimit(t, "from the pod to the outside", 10*mbit, meter.Flow{
		From:   place(p.netns),
		To:     place(outsideNetns),
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

// TestSequence gives one hostPort to one pod after the other.
func TestSequence(t *testing.T) {
	c := openRuntime(t)
	const port = 18083
	for i := range 3 {
		p := runPod(t, c, "seq-"+strconv.Itoa(i), hostPort(port), limits("100M", "100M"))
		p.serves("", netip.AddrPortFrom(node4, port))
		p.remove()
	}
}

func TestStopTwice(t *testing.T) {
	c := openRuntime(t)
	p := runPod(t, c, "twice", hostPort(18084), limits("100M", "100M"))
	p.stop()
	p.stop()
	p.remove()
}

// TestRestart: the runtime that stops a pod is not the one that ran it, and
// knows only what is on disk.
func TestRestart(t *testing.T) {
	c := openRuntime(t)
	const port = 18085
	p := runPod(t, c, "restart", hostPort(port), limits("100M", "100M"))
	restartContainerd(t, c)
	p.serves("", netip.AddrPortFrom(node4, port))
	p.remove()
}

func restartContainerd(t *testing.T, c runtimeClient) {
	t.Helper()
	before := containerdPID(t)
	if err := syscall.Kill(before, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	err := eventually(t.Context(), 20*time.Second, func() error {
		if containerdPID(t) == before {
			return fmt.Errorf("containerd %d still runs", before)
		}
		return c.ready(t.Context())
	})
	if err != nil {
		t.Fatalf("restart of containerd: %v", err)
	}
}

func containerdPID(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/run/node/containerd.pid")
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// TestFailedRun: a pod that cannot get its network keeps nothing, and the
// error that reaches the kubelet's events names it.
func TestFailedRun(t *testing.T) {
	c := openRuntime(t)
	_, err := c.run(t.Context(), podConfig("wrong", hostPort(70000), limits("100M", "100M")))
	if err == nil {
		t.Fatal("a pod with hostPort 70000 runs")
	}
	if !strings.Contains(err.Error(), "shop/wrong") || !strings.Contains(err.Error(), "70000") {
		t.Errorf("want an error with the pod shop/wrong and the port 70000: %v", err)
	}
	if err := c.removeAll(t.Context()); err != nil {
		t.Error(err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/kernel/kerneltest"
	"github.com/podlace/podlace/pkg/sandbox"
)

// runAdmin runs the commands that an administrator would run. If the program of a command is not installed, runAdmin skips the test.
func runAdmin(t *testing.T, commands ...string) {
	t.Helper()
	for _, c := range commands {
		cmd := exec.Command("/bin/sh", "-c", c)
		cmd.Env = []string{"PATH=/usr/sbin:/sbin:/usr/bin:/bin"}
		out, err := cmd.CombinedOutput()
		if strings.Contains(string(out), "not found") {
			t.Skipf("SKIPPED: %s", out)
		}
		if err != nil {
			t.Fatalf("%s: %v: %s", c, err, out)
		}
	}
}

// newMachine creates a namespace that is connected to the node and uses the node as its router.
func newMachine(t *testing.T, hostSide string, node, own []string) *sandbox.Pod {
	t.Helper()
	pod, host := kerneltest.NewPod(t), openHost(t)
	netns, err := os.Open(pod.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Close()
	if _, err := host.AddVeth(kernel.Veth{Host: hostSide, Pod: "eth0", Netns: netns}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := host.DelLink(hostSide); err != nil {
			t.Error(err)
		}
	})
	inside, err := kernel.Open(netns)
	if err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	plug := func(ns *kernel.NS, name string, addresses []string) kernel.Link {
		link, _, err := ns.Link(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range addresses {
			if err := ns.AddAddress(link, netip.MustParsePrefix(a), false); err != nil {
				t.Fatal(err)
			}
		}
		err = errors.Join(ns.Set(kernel.Sysctl{Path: "ipv6/conf/" + name + "/accept_dad", Value: "0"}), ns.SetUp(link))
		if err != nil {
			t.Fatal(err)
		}
		return link
	}
	plug(&host.NS, hostSide, node)
	link := plug(inside, "eth0", own)
	for _, n := range node {
		gateway, all := netip.MustParsePrefix(n).Addr(), "0.0.0.0/0"
		if gateway.Is6() {
			all = "::/0"
		}
		if err := inside.AddRoute(link, kernel.Route{Dst: netip.MustParsePrefix(all), Gateway: gateway}); err != nil {
			t.Fatal(err)
		}
	}
	return pod
}

// canConnect reports whether a TCP client can connect to the pod's server on port 80. If the first packet is lost, the client sends the
// packet again.
func canConnect(t *testing.T, from *sandbox.Pod, address string, limit time.Duration) bool {
	t.Helper()
	err := from.Do(func() error {
		c, err := net.DialTimeout("tcp", net.JoinHostPort(address, "80"), limit)
		if err == nil {
			err = c.Close()
		}
		return err
	})
	return err == nil
}

// TestForwardPolicy checks that a firewall with policy drop causes a warning that contains the name of the firewall. After an administrator
// has run the commands in the warning, connections must be possible.
func TestForwardPolicy(t *testing.T) {
	kerneltest.Slow(t)
	lan := newMachine(t, "ptf0", []string{"10.74.0.1/24", "fd00:74::1/64"}, []string{"10.74.0.2/24", "fd00:74::2/64"})
	pod := newMachine(t, "ptf1", []string{"10.75.0.1/24", "fd00:75::1/64"}, []string{"10.75.0.2/24", "fd00:75::2/64"})
	host := openHost(t)
	for _, path := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := host.Set(kernel.Sysctl{Path: path, Value: "1"}); err != nil {
			t.Fatal(err)
		}
	}
	var server net.Listener
	// Package net checks only once which address families are usable. While the link lo of a pod is down, package net finds no usable
	// address family in this pod.
	if l, err := net.Listen("tcp", "[::1]:0"); err == nil {
		l.Close()
	}
	if err := pod.Do(func() (err error) { server, err = net.Listen("tcp", "[::]:80"); return err }); err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	addresses := []netip.Prefix{netip.MustParsePrefix("10.75.0.2/24"), netip.MustParsePrefix("fd00:75::2/64")}

	for title, c := range map[string]struct {
		firewall, want []string
	}{
		"none": {nil, nil},
		"iptables": {[]string{"iptables -P FORWARD DROP", "ip6tables -P FORWARD DROP"},
			[]string{"chain ip filter FORWARD has policy drop: unless a rule accepts 10.75.0.0/24",
				"chain ip6 filter FORWARD has policy drop: unless a rule accepts fd00:75::/64"}},
		"docker": {[]string{"iptables -P FORWARD DROP", "iptables -N DOCKER-USER", "iptables -A DOCKER-USER -j RETURN",
			"iptables -A FORWARD -j DOCKER-USER"},
			[]string{"chain ip filter FORWARD has policy drop, as Docker sets it: unless a rule accepts 10.75.0.0/24"}},
		"nftables": {[]string{"nft add table inet filter",
			"nft 'add chain inet filter forward { type filter hook forward priority filter; policy drop; }'"},
			[]string{"chain inet filter forward has policy drop: unless a rule accepts 10.75.0.0/24",
				"chain inet filter forward has policy drop: unless a rule accepts fd00:75::/64"}},
	} {
		t.Run(title, func(t *testing.T) {
			t.Cleanup(func() {
				if err := kerneltest.FlushNFT(); err != nil {
					t.Error(err)
				}
			})
			runAdmin(t, c.firewall...)
			list, err := droppingChains(host, addresses)
			var texts []string
			for _, o := range list {
				texts = append(texts, o.text)
			}
			for i := range c.want {
				c.want[i] += ", other machines and pods do not reach its hostPorts"
			}
			if diff := cmp.Diff(c.want, texts); err != nil || diff != "" {
				t.Fatalf("%v\n%s", err, diff)
			}
			for _, p := range addresses {
				blocked := false
				for _, o := range list {
					blocked = blocked || strings.Contains(o.text, p.Masked().String())
				}
				limit := 5 * time.Second
				if blocked {
					limit = time.Second / 2
				}
				if canConnect(t, lan, p.Addr().String(), limit) == blocked {
					t.Errorf("%s: blocked is %t, and the warnings are %q", p, !blocked, texts)
				}
			}
			for _, o := range list {
				runAdmin(t, o.fix...)
			}
			for _, p := range addresses {
				if !canConnect(t, lan, p.Addr().String(), 5*time.Second) {
					t.Errorf("%s is not reached with the fix in place", p)
				}
			}
		})
	}
}

// TestForwardKeeper checks the warning about the chain FORWARD. The other chains on the node show which firewall manages FORWARD, and the
// warning must contain the commands of that firewall.
func TestForwardKeeper(t *testing.T) {
	host := openHost(t)
	for title, c := range map[string]struct {
		firewall, pod string
		fix           []string
	}{
		"ufw": {"iptables -P FORWARD DROP; iptables -N ufw-user-forward", "10.75.0.2/24",
			[]string{"ufw route allow to 10.75.0.0/24", "ufw route allow from 10.75.0.0/24"}},
		"ufw IPv6": {"ip6tables -P FORWARD DROP; ip6tables -N ufw6-user-forward", "fd00:75::2/64",
			[]string{"ufw route allow to fd00:75::/64", "ufw route allow from fd00:75::/64"}},
		"Docker before ufw": {"iptables -P FORWARD DROP; iptables -N ufw-user-forward; iptables -N DOCKER-USER", "10.75.0.2/24",
			[]string{"iptables -I DOCKER-USER -d 10.75.0.0/24 -j ACCEPT", "iptables -I DOCKER-USER -s 10.75.0.0/24 -j ACCEPT"}},
		"a pod without subnet": {"iptables -P FORWARD DROP", "10.75.0.2/32",
			[]string{"iptables -A FORWARD -d 10.75.0.2/32 -j ACCEPT", "iptables -A FORWARD -s 10.75.0.2/32 -j ACCEPT"}},
	} {
		t.Run(title, func(t *testing.T) {
			t.Cleanup(func() {
				if err := kerneltest.FlushNFT(); err != nil {
					t.Error(err)
				}
			})
			runAdmin(t, c.firewall)
			var log bytes.Buffer
			pod := []netip.Prefix{netip.MustParsePrefix(c.pod)}
			list, err := droppingChains(host, pod)
			if err != nil || len(list) != 1 || !cmp.Equal(c.fix, list[0].fix) {
				t.Errorf("%v, %+v", err, list)
			}
			warnForward(slog.New(slog.NewTextHandler(&log, nil)), host, pod)
			if !strings.Contains(log.String(), "level=WARN") || !strings.Contains(log.String(), c.fix[1]) {
				t.Errorf("the log says %q", log.String())
			}
		})
	}
}

func BenchmarkWarnForward(b *testing.B) {
	host, err := kernel.Host()
	if err != nil {
		b.Fatal(err)
	}
	defer host.Close()
	pod := []netip.Prefix{netip.MustParsePrefix("10.75.0.2/24"), netip.MustParsePrefix("fd00:75::2/64")}
	for b.Loop() {
		warnForward(slog.New(slog.DiscardHandler), host, pod)
	}
}

// TestWarnHairpin checks that CHECK logs why a pod cannot reach its own hostPorts.
func TestWarnHairpin(t *testing.T) {
	l, host := newLab(t), openHost(t)
	every := kernel.Sysctl{Path: "bridge/bridge-nf-call-iptables", Value: "0"}
	if err := host.Set(every); err != nil {
		t.Skipf("SKIPPED: no br_netfilter: %v", err)
	}
	newMachine(t, "pt1", nil, nil)
	prev := resultOf(t, prevResult("10.71.0.5/24"))
	prev.Interfaces = append(prev.Interfaces, &types100.Interface{Name: "pt1"})
	warns := func() bool {
		var out bytes.Buffer
		warnHairpin(slog.New(slog.NewTextHandler(&out, nil)), host, prev)
		return strings.Contains(out.String(), "bridge=pt0 port=pt1")
	}
	want := func(what string, want bool) {
		t.Helper()
		if warns() != want {
			t.Errorf("%s: warns %t", what, !want)
		}
	}
	want("alone", false)
	runAdmin(t, "ip link set pt1 master pt0")
	want("no filtering", false)
	runAdmin(t, "ip link set pt0 type bridge nf_call_iptables 1")
	want("the bridge is filtered", true)
	runAdmin(t, "ip link set pt0 type bridge nf_call_iptables 0")
	every.Value = "1"
	if err := host.Set(every); err != nil {
		t.Fatal(err)
	}
	want("every bridge is filtered", true)
	runAdmin(t, "bridge link set dev pt1 hairpin on")
	want("hairpin", false)
	every.Value = "0"
	if err := host.Set(every); err != nil {
		t.Fatal(err)
	}
	l.OK(l.Call("ADD", "a"))
	l.OK(l.Call("CHECK", "a"))
	l.OK(l.Call("DEL", "a"))
}

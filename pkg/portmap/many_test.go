// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// With iptables, the memory that CHECK needs grows linearly with the number of the pod's ports.
func TestManyPorts(t *testing.T) {
	const chain = "CNI-DN-X"
	jump := func(from string) []string { return []string{"-A " + from + " -j " + dnatChain + " "} }
	nat := iptables.Table{"PREROUTING": jump("PREROUTING"), "OUTPUT": jump("OUTPUT")}
	var list []ports.Port
	for i := range uint16(2000) {
		p := ports.Port{Protocol: "tcp", Port: 20000 + i, To: netip.AddrPortFrom(netip.MustParseAddr("10.1.0.5"), 80)}
		list = append(list, p)
		nat[dnatChain] = append(nat[dnatChain], fmt.Sprintf("-A %s -p tcp -m multiport --dports %d -j %s ", dnatChain, p.Port, chain))
		nat[chain] = append(nat[chain], fmt.Sprintf("-A %s -p tcp -m tcp --dport %d -j DNAT --to-destination %s ", chain, p.Port, p.To))
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if err := checkRules(nat, chain, list); err != nil {
		t.Error(err)
	}
	runtime.ReadMemStats(&after)
	if mb := (after.TotalAlloc - before.TotalAlloc) >> 20; mb > 20 {
		t.Errorf("CHECK takes %d MB", mb)
	}
	nat[chain] = nat[chain][1:]
	if checkRules(nat, chain, list) == nil {
		t.Error("a missing rule is not seen")
	}
}

// The time to parse port mappings grows linearly with their number (S-15).
func TestMeasuredParse(t *testing.T) {
	entries := func(n int) (list []string) {
		for i := range n {
			list = append(list, fmt.Sprintf(`{"hostPort":%d,"containerPort":%d}`, 1+i, 1+i))
		}
		return list
	}
	pod := []netip.Prefix{netip.MustParsePrefix("10.1.0.5/24"), netip.MustParsePrefix("fd00::5/64")}
	took := func(n int) time.Duration {
		text := withMappings(append(entries(n), entries(n)...)...)
		start := time.Now()
		c, err := parsed(text)
		if err != nil || len(c.Ports) != 4*n { // two families
			t.Fatalf("%d ports, %v", len(c.Ports), err)
		}
		if list := c.hostPorts(pod); len(ports.Singles(list)) != 2*n || len(list) != 2 {
			t.Errorf("%d ports", len(list))
		}
		return time.Since(start)
	}
	few, many := time.Hour, time.Hour
	for range 5 {
		few, many = min(few, took(1250)), min(many, took(10000))
	}
	if many > 32*few { // 8 times as many ports: factor 8 if linear, 64 if quadratic
		t.Errorf("10,000 mappings took %s, 1,250 took %s", many, few)
	}
	if _, err := parsed(withMappings(append(entries(10000), `{"hostPort":9999,"containerPort":1}`)...)); err == nil ||
		!strings.Contains(err.Error(), "portMappings[10000]: hostPort 9999 leads to containerPort 9999 already") {
		t.Errorf("got %v", err)
	}
}

// scatteredPorts returns ports that cannot be merged into a range.
func scatteredPorts(n int) (list []any) {
	for i := range n {
		list = append(list, port(2000+2*i, 80, "udp"))
	}
	return list
}

// A limit of ports per pod keeps ADD from holding the lock too long. Above it, ADD fails before it changes anything (S-15).
func TestTooManyPorts(t *testing.T) {
	pod := []netip.Prefix{netip.MustParsePrefix("10.71.0.5/24"), netip.MustParsePrefix("fd00:71::5/64")}
	for _, c := range []struct {
		ports []any
		keys  string
		says  string
	}{
		{scatteredPorts(1024), "", ""},
		{scatteredPorts(1025), "", "1025 hostPorts: want at most 1024"},
		{sequence(2000, 10000), "", ""}, // one range
		{sequence(2000, 2000), `"backend":"iptables",`, "2000 hostPorts: want at most 1024"},
		{scatteredPorts(1100), `"maxHostPorts":1100,`, ""},
		{scatteredPorts(2), `"maxHostPorts":0,`, "maxHostPorts 0: want 1-10000"},
		{scatteredPorts(2), `"maxHostPorts":10001,`, "maxHostPorts 10001: want 1-10000"},
	} {
		list, err := json.Marshal(c.ports)
		if err != nil {
			t.Fatal(err)
		}
		cfg, err := parsed(c.keys + `"runtimeConfig":{"portMappings":` + string(list) + `}`)
		if err == nil {
			err = cfg.checkCount(cfg.hostPorts(pod))
		}
		if c.says == "" && err != nil || c.says != "" && (plugin.Code(err) != plugin.CodeConfig || err.Error() != c.says) {
			t.Errorf("%d ports with %q: %v, want %q", len(c.ports), c.keys, err, c.says)
		}
	}
	l := newLab(t)
	l.Conf = l.Conf.With("maxHostPorts", 30)
	l.Fails(l.Call("ADD", "a", "runtimeConfig", object{"portMappings": scatteredPorts(31)}), plugin.CodeConfig,
		"31 hostPorts: want at most 30")
	if left, _, err := attachment.Scan(); err != nil || len(left) > 0 || l.isMapped("a") {
		t.Errorf("left %v, %v", left, err)
	}
	// Another attachment has some ports of the range, so it is split into single ports.
	l.OK(l.Call("ADD", "a", asking("10.71.0.5/24", sequence(8000, 31)...)...))
	l.Fails(l.Call("ADD", "a", inOther("nftables", sequence(8001, 31)...)...), plugin.CodeConfig, "31 hostPorts: want at most 30")
	l.OK(l.Call("DEL", "a"))
}

// DEL can read the largest possible record: the most ports, each with the longest text.
func TestLargestRecord(t *testing.T) {
	r := &plugin.Request{Plugin: "portmap", Network: "largest", ContainerID: strings.Repeat("c", 64), IfName: "eth0",
		NetnsPath: "/run/netns/x"}
	att, err := attachment.Open(r)
	if err != nil {
		t.Fatal(err)
	}
	defer att.Close()
	long := netip.MustParseAddr("fd00:1111:2222:3333:4444:5555:6666:7777")
	st := portState{Backend: "nftables"}
	for i := range 2 * maxHostPortsLimit {
		st.Ports = append(st.Ports, ports.Port{Protocol: "sctp", HostIP: long, Port: 65535, To: netip.AddrPortFrom(long, uint16(i)), SNAT: true,
			MasqAll: true})
	}
	var got portState
	err = att.Save(st)
	if ok, e := att.Load(&got); !ok || err != nil || e != nil || len(got.Ports) != len(st.Ports) {
		t.Errorf("%t, %v, %v, %d ports", ok, err, e, len(got.Ports))
	}
	if err := att.Remove(); err != nil {
		t.Error(err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// eachBackend runs a test with each available backend.
func eachBackend(t *testing.T, test func(testLab)) {
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) {
			if backend == "iptables" && (!iptables.Installed(true) || !iptables.Installed(false)) {
				t.Skip("SKIPPED: iptables is not installed")
			}
			l := newLab(t)
			l.Conf = l.Conf.With("backend", backend)
			test(l)
		})
	}
}

// isMapped reports whether either backend has state of a container.
func (l testLab) isMapped(id string) bool {
	l.Helper()
	for _, line := range podElements(l.T) {
		if strings.Contains(line, attachment.Key{Network: "net", ContainerID: id, IfName: "eth0"}.Hash()) {
			return true
		}
	}
	if !iptables.Installed(true) || !iptables.Installed(false) {
		return false
	}
	for _, is4 := range []bool{true, false} {
		nat := natTable(l.T, is4)
		if nat.HasChain(l.chain(id)) || len(nat.Rules(dnatChain, l.chain(id))) > 0 {
			return true
		}
	}
	return false
}

func TestAddCheckDel(t *testing.T) {
	eachBackend(t, func(l testLab) {
		l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, "missing")
		for range 2 { // a repeated ADD converges
			o := l.OK(l.Call("ADD", "a"))
			if !strings.Contains(string(o.Stdout), "10.71.0.5/24") {
				l.Errorf("the result of before is not passed on: %s", o.Stdout)
			}
			l.OK(l.Call("CHECK", "a"))
			if !l.isMapped("a") {
				l.Error("nothing is mapped")
			}
		}
		l.Fails(l.Call("CHECK", "b"), plugin.CodeStateDiffers, "")
		for range 2 {
			l.OK(l.Call("DEL", "a"))
			if l.isMapped("a") {
				l.Error("DEL left something")
			}
		}
		l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, "missing")
		if names, _ := os.ReadDir(filepath.Join(store.Root, "net")); len(names) > 1 {
			l.Errorf("records are left: %v", names)
		}
	})
}

// A second ADD replaces the ports of the first, even with another backend.
func TestAddAgainChanged(t *testing.T) {
	eachBackend(t, func(l testLab) {
		l.OK(l.Call("ADD", "a"))
		other := object{"portMappings": []any{port(8081, 80, "tcp")}}
		l.OK(l.Call("ADD", "a", "runtimeConfig", other))
		l.OK(l.Call("CHECK", "a", "runtimeConfig", other))
		l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, "")
		l.OK(l.Call("ADD", "a", "backend", "nftables"))
		l.OK(l.Call("CHECK", "a", "backend", "nftables"))
		l.OK(l.Call("DEL", "a"))
		if l.isMapped("a") {
			l.Error("something is left")
		}
	})
}

// DEL works with any current configuration and removes only the state of its pod.
func TestDelKeepsOthers(t *testing.T) {
	eachBackend(t, func(l testLab) {
		l.OK(l.Call("ADD", "a"))
		bPorts := object{"portMappings": []any{port(9090, 80, "tcp")}}
		bPrev := prevResult("10.71.0.6/24", "fd00:71::6/64")
		l.OK(l.Call("ADD", "b", "runtimeConfig", bPorts, "prevResult", bPrev))
		l.OK(l.Call("DEL", "a", "runtimeConfig", nil, "prevResult", nil, "backend", "nonsense"))
		if l.isMapped("a") {
			l.Error("something of a is left")
		}
		l.OK(l.Call("CHECK", "b", "runtimeConfig", bPorts, "prevResult", bPrev))
		l.OK(l.Call("DEL", "b"))
	})
}

// With nftables, only one pod can have a port; the error of the second ADD names the first pod.
func TestConflict(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a"))
	before := podElements(t)
	o := l.Call("ADD", "b", "runtimeConfig", object{"portMappings": []any{port(9090, 80, "tcp"), port(8080, 80, "tcp")}})
	l.Fails(o, plugin.CodePortConflict, "hostPort tcp 8080 is in use by shop/a")
	if diff := cmp.Diff(before, podElements(t)); diff != "" {
		t.Error(diff)
	}
	l.OK(l.Call("DEL", "b"))
	l.OK(l.Call("CHECK", "a"))
	l.OK(l.Call("DEL", "a"))
}

func TestNothingToDo(t *testing.T) {
	l := newLab(t)
	kerneltest.Clean(t)
	for what, keys := range map[string][]any{
		"no mappings": {"runtimeConfig", object{}},
		"empty list":  {"runtimeConfig", object{"portMappings": []any{}}},
		"another family": {"runtimeConfig", object{"portMappings": []any{object{"hostPort": 1, "containerPort": 1, "hostIP": "2001:db8::1"}}},
			"prevResult", prevResult("10.71.0.5/24")},
	} {
		for _, verb := range []string{"ADD", "CHECK", "DEL", "STATUS"} {
			if o := l.Call(verb, "a", keys...); o.Exit != 0 {
				t.Errorf("%s, %s: %s", what, verb, o.Stdout)
			}
		}
	}
	if len(podElements(t)) > 0 || l.isMapped("a") {
		t.Error("something is mapped")
	}
}

func TestRefused(t *testing.T) {
	eachBackend(t, func(l testLab) {
		kerneltest.Clean(l.T)
		l.Fails(l.Call("ADD", "a", "prevResult", prevResult()), plugin.CodeConfig, "prevResult gives eth0 no address")
		l.Fails(l.Call("ADD", "a", "prevResult", nil), plugin.CodeConfig, "needs a prevResult")
		for _, verb := range []string{"ADD", "CHECK", "STATUS"} {
			l.Fails(l.Call(verb, "a", "runtimeConfig", object{"portMappings": []any{port(0, 80, "tcp")}}), plugin.CodeConfig,
				"Invalid host port number: 0")
		}
	})
}

// 127.0.0.1 of the node reaches the pod if a port requires it.
func TestRouteLocalnet(t *testing.T) {
	const path = "ipv4/conf/pt0/route_localnet"
	for what, c := range map[string]struct {
		keys []any
		want string
	}{
		"plain":        {nil, "2"},
		"without snat": {[]any{"snat", false}, "0"},
		"IPv6 only":    {[]any{"prevResult", prevResult("fd00:71::5/64")}, "0"},
		"other address": {[]any{"runtimeConfig", object{"portMappings": []any{object{"hostPort": 1, "containerPort": 1, "hostIP": "10.71.0.1"}}}},
			"0"},
		"loopback": {[]any{"runtimeConfig", object{"portMappings": []any{object{"hostPort": 1, "containerPort": 1, "hostIP": "127.0.0.1"}}}},
			"2"},
	} {
		t.Run(what, func(t *testing.T) {
			l := newLab(t)
			l.OK(l.Call("ADD", "a", c.keys...))
			if got, err := openHost(t).Get(path); got != c.want || err != nil {
				t.Errorf("%s: %s is %s, %v, want %s", what, path, got, err, c.want)
			}
			l.OK(l.Call("DEL", "a"))
		})
	}
}

func TestExternalChain(t *testing.T) {
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := newLab(t)
	l.Conf = l.Conf.With("externalSetMarkChain", "KUBE-MARK-MASQ")
	l.Fails(l.Call("ADD", "a"), plugin.CodeConfig, "externalSetMarkChain KUBE-MARK-MASQ: no such chain")
	for _, is4 := range []bool{true, false} {
		applyIPTables(t, is4, func(iptables.Table) []string { return []string{":KUBE-MARK-MASQ - [0:0]"} })
	}
	l.OK(l.Call("ADD", "a"))
	l.OK(l.Call("CHECK", "a"))
	nat := natTable(t, true)
	if nat.HasChain(masqChain) || nat.HasChain(markChain) || len(nat.Rules(l.chain("a"), "-j KUBE-MARK-MASQ ")) != 4 {
		t.Errorf("rules %q", nat.Rules(l.chain("a")))
	}
	l.OK(l.Call("DEL", "a"))
}

func TestGC(t *testing.T) {
	eachBackend(t, func(l testLab) {
		l.OK(l.Call("ADD", "kept"))
		l.OK(l.Call("ADD", "gone", "runtimeConfig", object{"portMappings": []any{port(9090, 80, "tcp")}}))
		if err := kerneltest.Age(kerneltest.StateDirs()...); err != nil {
			l.Fatal(err)
		}
		for range 2 {
			l.OK(l.Call("GC", "", "cni.dev/valid-attachments", []any{object{"containerID": "kept", "ifname": "eth0"}}))
			if l.isMapped("gone") {
				l.Error("an invalid attachment is still there")
			}
			l.OK(l.Call("CHECK", "kept"))
		}
		l.OK(l.Call("DEL", "kept"))
	})
}

// A client that keeps sending to a UDP port reaches the pod that has it, also after the record or the rules were lost (F-38).
func TestStaleFlows(t *testing.T) {
	l := newLab(t)
	t.Cleanup(func() { _ = netlink.ConntrackTableFlush(netlink.ConntrackTable) })
	flow := func(answer string) *netlink.ConntrackFlow {
		from, to := ip("203.0.113.1"), ip("10.71.0.1")
		return &netlink.ConntrackFlow{FamilyType: 2, TimeOut: 100,
			Forward: netlink.IPTuple{Protocol: 17, SrcIP: from, DstIP: to, SrcPort: 1000, DstPort: 5353},
			Reverse: netlink.IPTuple{Protocol: 17, SrcIP: ip(answer), DstIP: from, SrcPort: 5353, DstPort: 1000}}
	}
	count := func() int {
		list, err := netlink.ConntrackTableList(netlink.ConntrackTable, 2)
		if err != nil {
			t.Fatal(err)
		}
		return len(slices.DeleteFunc(list, func(f *netlink.ConntrackFlow) bool { return f.Forward.DstPort != 5353 }))
	}
	valid := []any{"cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}}
	for _, c := range []struct{ verb, answer, lost string }{
		{"ADD", "10.71.0.1", ""}, {"GC", "10.71.0.1", ""}, {"DEL", "10.71.0.5", ""}, {"ADD", "10.71.0.1", ""},
		{"DEL", "10.71.0.5", l.recordFile("a")},
	} {
		if err := netlink.ConntrackCreate(netlink.ConntrackTable, 2, flow(c.answer)); err != nil || count() != 1 {
			t.Fatalf("%d entries, %v", count(), err)
		}
		_ = os.Remove(c.lost)
		if c.verb == "GC" { // GC restores the port after a flush; meanwhile a client's packets went to the node
			if err := kerneltest.FlushNFT(); err != nil {
				t.Fatal(err)
			}
			l.OK(l.Call("GC", "", valid...))
		} else {
			l.OK(l.Call(c.verb, "a"))
		}
		if n := count(); n != 0 {
			t.Errorf("%s left %d entries; lost before: %q", c.verb, n, c.lost)
		}
	}
}

func TestOwner(t *testing.T) {
	a := attachment.Key{Network: "net", ContainerID: "id", IfName: "eth0"}
	for want, pod := range map[string]plugin.Pod{
		" id": {}, " shop/web-0": {Namespace: "shop", Name: "web-0"}, " a_b/x__y_": {Namespace: "a b", Name: "x\"\ny}"},
	} {
		if got := ownerComment(a, pod.String()); got != a.Hash()+want {
			t.Errorf("%q, want %q", got, a.Hash()+want)
		}
	}
}

// A connection to a mapped port on [::1] is refused at once, while a server on [::1] stays reachable.
func TestLoopback6(t *testing.T) {
	eachBackend(t, func(l testLab) {
		l.OK(l.Call("ADD", "a"))
		start := time.Now()
		if c, err := net.DialTimeout("tcp6", "[::1]:8080", 5*time.Second); !errors.Is(err, unix.ECONNREFUSED) {
			l.Errorf("tcp: %v, %v, want a refusal", c, err)
		}
		udp, err := net.Dial("udp6", "[::1]:5353")
		if err != nil {
			l.Fatal(err)
		}
		defer udp.Close()
		_, _ = udp.Write([]byte("x"))
		_ = udp.SetReadDeadline(time.Now().Add(5 * time.Second))
		if _, err := udp.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNREFUSED) {
			l.Errorf("udp: %v, want a refusal", err)
		}
		if took := time.Since(start); took > time.Second {
			l.Errorf("the refusals took %s", took)
		}
		listener, err := net.Listen("tcp6", "[::1]:8080")
		if err != nil {
			l.Fatal(err)
		}
		defer listener.Close()
		c, err := net.DialTimeout("tcp6", "[::1]:8080", 5*time.Second)
		if err != nil {
			l.Fatal(err)
		}
		c.Close()
		// Connections to other IPv6 addresses of the node reach the pod, which does not reply here.
		if c, err := net.DialTimeout("tcp6", "[fd00:71::1]:8080", 100*time.Millisecond); err == nil || errors.Is(err, unix.ECONNREFUSED) {
			l.Errorf("the port of another address: %v, %v, want no answer", c, err)
		}
		l.OK(l.Call("CHECK", "a"))
	})
}

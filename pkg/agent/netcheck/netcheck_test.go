// SPDX-License-Identifier: Apache-2.0

package netcheck

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

// TestTable: the table tells the working paths from those that fail, and leaves out what the cluster has not.
func TestTable(t *testing.T) {
	addr := netip.MustParseAddr
	serve := func(ip, name string, port string) {
		go func() { _ = Serve(t.Context(), net.JoinHostPort(ip, port), name) }()
	}
	serve("127.0.0.2", "n1", "18080")
	serve("127.0.0.2", "n1", "18081")
	serve("127.0.0.3", "n2", "18080")
	serve("127.0.0.4", "imposter", "18080")
	short, err := net.Listen("tcp", "127.0.0.5:18080")
	if err != nil {
		t.Fatal(err)
	}
	defer short.Close()
	go func() {
		for {
			conn, err := short.Accept()
			if err != nil {
				return
			}
			_, _ = io.Copy(io.Discard, conn)
			_, _ = conn.Write([]byte("n5\nx"))
			_ = conn.Close()
		}
	}()
	c := Cluster{Node: "n1", Nodes: 7, Name: "localhost", Port: 18080, HostPort: 18081, Patience: 1e9, Service: []netip.Addr{addr("127.0.0.3"), addr("127.0.0.1")},
		Outside: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.3:18080"), netip.MustParseAddrPort("[::1]:18080")},
		Servers: []Server{
			{Node: "n1", IPs: []netip.Addr{addr("127.0.0.2")}, NodeIPs: []netip.Addr{addr("127.0.0.2"), addr("::1")}},
			{Node: "n2", IPs: []netip.Addr{addr("127.0.0.3")}, NodeIPs: []netip.Addr{addr("127.0.0.3")}},
			{Node: "n3", IPs: []netip.Addr{addr("127.0.0.4")}, NodeIPs: []netip.Addr{addr("127.0.0.2")}},
			{Node: "n4", NotReady: true},
			{Node: "n5", IPs: []netip.Addr{addr("127.0.0.5")}},
		}}
	var out strings.Builder
	if c.Run(t.Context(), &out) {
		t.Error("all is fine")
	}
	want := `
FROM A POD OF n1 TO          IPv4                                                                       IPv6
a pod of the same node       ok 1                                                                       -
pods of other nodes          FAILS 2 of 3: n3 "imposter" answered; n5 1 of 65536 bytes came             -
a Service                    FAILS 1 of 2: 127.0.0.1 connection refused                                 -
a hostPort of the same node  ok 1                                                                       -
hostPorts of other nodes     FAILS 2 of 2: n2 connection refused; n3 "n1" answered                      -
a name of the cluster's DNS  FAILS 1 of 2: 127.0.0.3 localhost has [127.0.0.1]                          -
outside                      ok 1                                                                       -
the server on n4 is not ready: kubectl describe its pod
2 of 7 nodes have no server: kubectl describe the DaemonSet
`
	if diff := cmp.Diff(strings.Fields(want), strings.Fields(out.String())); diff != "" {
		t.Errorf("%s\n%s", diff, out.String())
	}
}

// TestManyTargets: a cell tries 32 targets at a time, and names 8 of those that fail.
func TestManyTargets(t *testing.T) {
	var running atomic.Int32
	full := make(chan struct{})
	open := sync.OnceFunc(func() { close(full) })
	var p path
	for i := range 40 {
		p.targets = append(p.targets, target{fmt.Sprint("n", i), netip.MustParseAddr("127.0.0.1"), func(context.Context) error {
			defer running.Add(-1)
			switch n := running.Add(1); {
			case n > 32:
				t.Errorf("%d targets at a time", n)
			case n == 32:
				time.Sleep(100 * time.Millisecond) // in which one more could begin
				open()
			}
			select {
			case <-full:
			case <-time.After(time.Minute):
				t.Error("not 32 targets at a time")
				open()
			}
			if i == 0 {
				return nil
			}
			return errors.New("refused")
		}})
	}
	want := "FAILS 39 of 40: n1 refused; n2 refused; n3 refused; n4 refused; n5 refused; n6 refused; n7 refused; n8 refused; 31 more"
	if got := new(Cluster).cell(t.Context(), p, true); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// TestVerdict: each fault alone fails the check, also a server that accepts a connection and says nothing.
func TestVerdict(t *testing.T) {
	addr := netip.MustParseAddr
	go func() { _ = Serve(t.Context(), "127.0.0.1:18080", "n1") }()
	silent, err := net.Listen("tcp", "127.0.0.7:18080")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for name, c := range map[string]struct {
		change func(*Cluster)
		says   string
	}{
		"":             {func(*Cluster) {}, "ok 1"},
		"not ready":    {func(c *Cluster) { c.Servers[0].NotReady = true }, "the server on n1 is not ready"},
		"too few":      {func(c *Cluster) { c.Nodes = 2 }, "1 of 2 nodes have no server"},
		"a path fails": {func(c *Cluster) { c.Service = append(c.Service, addr("127.0.0.8")) }, "FAILS 1 of 2: 127.0.0.8 connection refused"},
		"silence":      {func(c *Cluster) { c.Service = append(c.Service, addr("127.0.0.7")) }, "FAILS 1 of 2: 127.0.0.7 i/o timeout"},
	} {
		own := []netip.Addr{addr("127.0.0.1")}
		cluster := Cluster{Node: "n1", Nodes: 1, Name: "localhost", Port: 18080, HostPort: 18080, Patience: time.Second, Service: own,
			Servers: []Server{{Node: "n1", IPs: own, NodeIPs: own}}}
		c.change(&cluster)
		var out strings.Builder
		if fine := cluster.Run(t.Context(), &out); fine != (name == "") || !strings.Contains(out.String(), c.says) {
			t.Errorf("%q: fine is %v, want the text %q in\n%s", name, fine, c.says, out.String())
		}
	}
}

// TestPatience: a path that fails at first is tried again.
func TestPatience(t *testing.T) {
	tries := 0
	late := target{"n1", netip.MustParseAddr("127.0.0.1"), func(context.Context) error {
		if tries++; tries < 3 {
			return errors.New("refused")
		}
		return nil
	}}
	if got := (Cluster{Patience: time.Minute}).cell(t.Context(), path{targets: []target{late}}, true); got != "ok 1" || tries != 3 {
		t.Errorf("%s after %d tries, want ok 1 after 3", got, tries)
	}
}

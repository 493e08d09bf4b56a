// SPDX-License-Identifier: Apache-2.0

// Package netcheck tests the connections of a pod to pods, a Service, hostPorts and addresses outside the cluster, and the cluster's DNS.
// [Serve] is the server on each node, [Cluster.Run] the client.
package netcheck

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
)

const (
	// payload is sent in both directions, so that packets of full size pass, too.
	payload = 64 << 10
	limit   = 3 * time.Second // of a connection
	retry   = 100 * time.Millisecond
	atOnce  = 32 // connections of a cell of the table
	named   = 8  // failures in a cell
)

// Serve answers each connection, after its end of input, with the name and a payload. It returns when ctx is done.
func Serve(ctx context.Context, address, name string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { _ = l.Close() })
	for {
		conn, err := l.Accept()
		if err != nil {
			return nil //nolint:nilerr // ctx is done
		}
		go func() {
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(limit))
			if _, err := io.Copy(io.Discard, conn); err == nil {
				_, _ = conn.Write(append([]byte(name+"\n"), make([]byte, payload)...))
			}
		}()
	}
}

// Server is a pod that serves, and its node.
type Server struct {
	Node     string
	IPs      []netip.Addr
	NodeIPs  []netip.Addr
	NotReady bool
}

// Cluster is what a client tests.
type Cluster struct {
	Node           string // of the client
	Servers        []Server
	Nodes          int          // that should have a server
	Service        []netip.Addr // of all servers
	Name           string       // that has the addresses of Service
	Port, HostPort uint16       // of the servers and of Service; of their nodes
	Outside        []netip.AddrPort
	Patience       time.Duration // how long a path may fail at first
}

// path is a row of the table. It tries every target of an IP family.
type path struct {
	title   string
	targets []target
}

type target struct {
	node string // "" for any
	addr netip.Addr
	try  func(context.Context) error
}

// Run tests all paths and prints a table. It reports whether all worked.
func (c Cluster) Run(ctx context.Context, w io.Writer) (fine bool) {
	paths := c.paths()
	cells := make([][2]string, len(paths))
	var all sync.WaitGroup
	for i, p := range paths {
		for column, is4 := range []bool{true, false} {
			all.Go(func() { cells[i][column] = c.cell(ctx, p, is4) })
		}
	}
	all.Wait()
	fine = true
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "FROM A POD OF %s TO\tIPv4\tIPv6\n", c.Node)
	for i, p := range paths {
		fmt.Fprintf(t, "%s\t%s\t%s\n", p.title, cells[i][0], cells[i][1])
		fine = fine && !strings.Contains(cells[i][0]+cells[i][1], "FAILS")
	}
	_ = t.Flush()
	for _, s := range c.Servers {
		if s.NotReady {
			fine = false
			fmt.Fprintf(w, "the server on %s is not ready: kubectl describe its pod\n", s.Node)
		}
	}
	if missing := c.Nodes - len(c.Servers); missing > 0 {
		fine = false
		fmt.Fprintf(w, "%d of %d nodes have no server: kubectl describe the DaemonSet\n", missing, c.Nodes)
	}
	return fine
}

// paths returns all rows. A node's hostPort is tried in the IP families of its pod.
func (c Cluster) paths() []path {
	own, others := path{title: "a pod of the same node"}, path{title: "pods of other nodes"}
	ownPort, otherPorts := path{title: "a hostPort of the same node"}, path{title: "hostPorts of other nodes"}
	for _, s := range c.Servers {
		pods, ports := &others, &otherPorts
		switch {
		case s.NotReady:
			continue
		case s.Node == c.Node:
			pods, ports = &own, &ownPort
		}
		pods.targets = append(pods.targets, c.served(s.Node, s.IPs, c.Port)...)
		ports.targets = append(ports.targets, c.served(s.Node, sameFamilies(s.NodeIPs, s.IPs), c.HostPort)...)
	}
	service, name, outside := path{title: "a Service"}, path{title: "a name of the cluster's DNS"}, path{title: "outside"}
	service.targets = c.served("", c.Service, c.Port)
	for _, addr := range c.Service {
		name.targets = append(name.targets, target{"", addr, func(ctx context.Context) error { return c.resolve(ctx, addr) }})
	}
	for _, at := range c.Outside {
		if len(sameFamilies([]netip.Addr{at.Addr()}, c.Service)) > 0 {
			outside.targets = append(outside.targets, target{"", at.Addr(), func(ctx context.Context) error { return connect(ctx, at) }})
		}
	}
	return []path{own, others, service, ownPort, otherPorts, name, outside}
}

// sameFamilies returns the addresses whose IP family the others have, too.
func sameFamilies(list, others []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(list), func(a netip.Addr) bool {
		return !slices.ContainsFunc(others, func(o netip.Addr) bool { return o.Is4() == a.Is4() })
	})
}

func (c Cluster) served(node string, addrs []netip.Addr, port uint16) (list []target) {
	for _, addr := range addrs {
		at := netip.AddrPortFrom(addr, port)
		list = append(list, target{node, addr, func(ctx context.Context) error { return ask(ctx, at, node) }})
	}
	return list
}

// cell tries the targets of an IP family and returns the cell of the table.
func (c Cluster) cell(ctx context.Context, p path, is4 bool) string {
	targets := slices.DeleteFunc(slices.Clone(p.targets), func(t target) bool { return t.addr.Is4() != is4 })
	failed := make([]string, len(targets))
	end, running, all := time.Now().Add(c.Patience), make(chan struct{}, atOnce), sync.WaitGroup{}
	for i, t := range targets {
		running <- struct{}{}
		all.Go(func() {
			err := t.try(ctx)
			for ; err != nil && time.Now().Before(end); err = t.try(ctx) {
				time.Sleep(retry)
			}
			if err != nil {
				failed[i] = cmp.Or(t.node, t.addr.String()) + " " + reason(err)
			}
			<-running
		})
	}
	all.Wait()
	failed = slices.DeleteFunc(failed, func(text string) bool { return text == "" })
	n := len(failed)
	switch {
	case len(targets) == 0:
		return "-"
	case n == 0:
		return fmt.Sprintf("ok %d", len(targets))
	case n > named:
		failed = append(failed[:named], fmt.Sprintf("%d more", n-named))
	}
	return fmt.Sprintf("FAILS %d of %d: %s", n, len(targets), strings.Join(failed, "; "))
}

// reason returns the last part of an error's text, without the addresses.
func reason(err error) string {
	parts := strings.Split(err.Error(), ": ")
	return parts[len(parts)-1]
}

// ask sends and receives a payload, and compares the name of the server unless want is "".
func ask(ctx context.Context, at netip.AddrPort, want string) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, "tcp", at.String())
	if err != nil {
		return err
	}
	defer c.Close()
	until, _ := ctx.Deadline()
	_ = c.SetDeadline(until)
	_, err = c.Write(make([]byte, payload))
	if tcp, ok := c.(*net.TCPConn); ok {
		err = errors.Join(err, tcp.CloseWrite())
	}
	if err != nil {
		return err
	}
	answer, err := io.ReadAll(c)
	name, rest, _ := strings.Cut(string(answer), "\n")
	switch {
	case err != nil:
		return err
	case want != "" && name != want:
		return fmt.Errorf("%q answered", name)
	case len(rest) != payload:
		return fmt.Errorf("%d of %d bytes came", len(rest), payload)
	}
	return nil
}

func connect(ctx context.Context, at netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, "tcp", at.String())
	if err == nil {
		err = c.Close()
	}
	return err
}

// resolve reports an error if the name has not the address.
func (c Cluster) resolve(ctx context.Context, want netip.Addr) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	network := map[bool]string{true: "ip4", false: "ip6"}[want.Is4()]
	got, err := new(net.Resolver).LookupNetIP(ctx, network, c.Name)
	for i := range got {
		got[i] = got[i].Unmap()
	}
	if err == nil && !slices.Contains(got, want) {
		err = fmt.Errorf("%s has %v", c.Name, got)
	}
	return err
}

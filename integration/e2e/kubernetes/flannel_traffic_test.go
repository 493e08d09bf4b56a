// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	echoPort     = 9000 // of TCP
	callEvery    = 10 * time.Millisecond
	callPatience = 30 * time.Second // of a TCP connection, in which a lost segment is sent again
)

// route is the path from a place to an address.
type route struct {
	from, address string
	port          int
}

// calls are connections and streams of datagrams that last until they are stopped.
type calls struct {
	stop  chan struct{}
	tasks sync.WaitGroup

	mu            sync.Mutex
	conns, broken int
	sent, lost    int
	reasons       []string
}

// call opens a connection for each path of tcp, and sends 100 datagrams a second along each path of udp.
func (f *flannel) call(t *testing.T, tcp, udp []route) *calls {
	t.Helper()
	c := &calls{stop: make(chan struct{}), conns: len(tcp)}
	for _, p := range tcp {
		conn := f.open(t, "tcp", p)
		c.tasks.Go(func() { c.converse(p, conn) })
	}
	for _, p := range udp {
		conn := f.answered(t, p)
		c.tasks.Go(func() { c.count(p, conn) })
	}
	return c
}

func (f *flannel) open(t *testing.T, network string, p route) (conn net.Conn) {
	t.Helper()
	err := f.places[p.from].Do(func() (err error) {
		conn, err = net.DialTimeout(network, net.JoinHostPort(p.address, fmt.Sprint(p.port)), dialLimit)
		return err
	})
	if err != nil {
		t.Fatalf("%s to %s by %s: %v", p.from, p.address, network, err)
	}
	return conn
}

// answered opens a stream of datagrams to a server that answers. Each try uses a new socket, because the kernel keeps the failed route
// of a stream that began before kube-proxy had the Service's rules.
func (f *flannel) answered(t *testing.T, p route) net.Conn {
	t.Helper()
	for deadline := time.Now().Add(callPatience); ; {
		conn := f.open(t, "udp", p)
		_ = conn.SetReadDeadline(time.Now().Add(100 * callEvery))
		_, err := conn.Write([]byte("?"))
		if err == nil {
			_, err = conn.Read(make([]byte, 256))
		}
		if err == nil {
			_ = conn.SetReadDeadline(time.Time{})
			return conn
		}
		_ = conn.Close()
		if time.Now().After(deadline) {
			t.Fatalf("%s to %s by udp: %v", p.from, p.address, err)
		}
	}
}

// converse sends one word after another and expects each back.
func (c *calls) converse(p route, conn net.Conn) {
	defer conn.Close()
	word := []byte("word")
	for !c.ended() {
		_ = conn.SetDeadline(time.Now().Add(callPatience))
		_, err := conn.Write(word)
		if err == nil {
			_, err = io.ReadFull(conn, word)
		}
		if err != nil {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.broken++
			c.reasons = append(c.reasons, fmt.Sprintf("the connection from %s to %s: %v", p.from, p.address, err))
			return
		}
		time.Sleep(callEvery)
	}
}

// count sends datagrams and counts the answers.
func (c *calls) count(p route, conn net.Conn) {
	defer conn.Close()
	answers := make(chan int)
	go func() {
		n := 0
		for buf := make([]byte, 256); ; n++ {
			if _, err := conn.Read(buf); err != nil {
				answers <- n
				return
			}
		}
	}()
	sent := 0
	for ; !c.ended(); sent++ {
		_, _ = conn.Write([]byte("?"))
		time.Sleep(callEvery)
	}
	_ = conn.SetReadDeadline(time.Now().Add(dialLimit))
	lost := sent - <-answers
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sent += sent
	c.lost += lost
	if lost != 0 {
		c.reasons = append(c.reasons, fmt.Sprintf("%d of %d datagrams from %s to %s", lost, sent, p.from, p.address))
	}
}

func (c *calls) ended() bool {
	select {
	case <-c.stop:
		return true
	default:
		return false
	}
}

// end prints the losses. No connection may be lost, and a datagram only if losses are expected.
func (c *calls) end(t *testing.T, what string, lossy bool) {
	t.Helper()
	close(c.stop)
	c.tasks.Wait()
	t.Logf("%s: %d of %d connections lost, %d of %d datagrams lost", what, c.broken, c.conns, c.lost, c.sent)
	if len(c.reasons) > 0 {
		t.Logf("lost while %s:\n%s", what, strings.Join(c.reasons, "\n"))
	}
	if c.broken > 0 || c.lost > 0 && !lossy {
		t.Errorf("%s lost connections or datagrams", what)
	}
}

// traffic connects pods across nodes, by pod addresses, by a service and with the machine outside.
func (f *flannel) traffic(t *testing.T, from, to string) *calls {
	t.Helper()
	server, outside := f.services["server2"]["4"], f.places["outside"].address["4"]
	udp := []route{{from + "1", server, 80}, {from + "1", outside, 8080},
		{"outside", "192.0.2.11", nodePort("server2")}, {"outside", "192.0.2.12", 8081},
	}
	if to == "last" { // the pods behind the service are deleted
		udp = udp[1:2]
	}
	tcp := append(f.tcpPaths(from, to), route{from + "1", outside, echoPort})
	if f.backend == "host-gw" || from != "new" { // after the return to flannel, a vxlan node has another address towards pods
		tcp = append(tcp, route{"node1", f.places[to+"2"].address["4"], echoPort})
	}
	for _, p := range f.tcpPaths(from, to) {
		udp = append(udp, route{p.from, p.address, 8080})
	}
	return f.call(t, tcp, udp)
}

// tcpPaths are the paths between pods of all nodes.
func (f *flannel) tcpPaths(from, to string) (paths []route) {
	for _, a := range f.nodes {
		for _, b := range f.nodes {
			if a != b {
				paths = append(paths, route{from + a, f.places[to+b].address["4"], echoPort})
			}
		}
	}
	return paths
}

// addPodsOf starts a pod on each node and checks which network attached it. Old and new pods and the machine outside must answer.
func (f *flannel) addPodsOf(t *testing.T, name, maker string) {
	t.Helper()
	var objects []any
	for _, n := range f.nodes {
		objects = append(objects, map[string]any{"apiVersion": "v1", "kind": "Pod",
			"metadata": map[string]any{"name": name + n, "namespace": namespace},
			"spec": map[string]any{"nodeName": "node" + n, "terminationGracePeriodSeconds": 1,
				"containers": []any{map[string]any{"name": "a", "image": "podlace.test/busybox:1"}}}})
	}
	f.apply(t, objects...)
	f.kubectl(t, "-n", namespace, "wait", "--for=condition=Ready", "pods", "--all", "--timeout=120s")
	f.addPods(t)
	f.checkLeases(t)
	for _, n := range f.nodes {
		serve(t, name+n, f.places[name+n])
		echo(t, f.places[name+n])
		records := f.run(t, "exec", "node"+n, "sh", "-c", "cat /run/podlace/cbr0/bridge-* 2>/dev/null || :")
		if made := strings.Contains(records, f.places[name+n].address["4"]); made != (maker == "Podlace") {
			t.Errorf("Podlace has a record of %s%s: %v, want the pod attached by %s", name, n, made, maker)
		}
	}
	for i, n := range f.nodes {
		other := f.nodes[(i+1)%len(f.nodes)]
		f.ask4(t, name+n, "server"+other)
		f.ask4(t, name+n, "server"+n)
		f.ask4(t, "client"+other, name+n)
		_, seen, err := f.ask(name+n, "tcp", f.places["outside"].address["4"], 8080, dialLimit)
		if want := f.places["node"+n].address["4"]; err != nil || seen.String() != want {
			t.Errorf("%s%s reaches the machine outside as %s, want %s: %v", name, n, seen, want, err)
		}
	}
}

func (f *flannel) ask4(t *testing.T, from, to string) {
	t.Helper()
	for _, network := range []string{"tcp", "udp"} {
		got, seen, err := f.ask(from, network, f.places[to].address["4"], 8080, dialLimit)
		if want := f.places[from].address["4"]; err != nil || got != to || seen.String() != want {
			t.Errorf("%s to %s by %s: answered by %q to %s, want to %s: %v", from, to, network, got, seen, want, err)
		}
	}
}

// echo returns the data of a connection until the end of the test.
func echo(t *testing.T, p *place) {
	t.Helper()
	var l net.Listener
	err := p.Do(func() (err error) {
		l, err = net.Listen("tcp", fmt.Sprint(":", echoPort))
		return err
	})
	if err != nil {
		t.Fatalf("echo in %s: %v", p.Name, err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(conn, conn); _ = conn.Close() }()
		}
	}()
}

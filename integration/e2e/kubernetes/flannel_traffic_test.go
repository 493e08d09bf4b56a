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

// dialPath is the path from a network namespace to an address and port.
type dialPath struct {
	from, address string
	port          int
}

// openCalls contains TCP connections and UDP flows that last until they are stopped.
type openCalls struct {
	stop  chan struct{}
	tasks sync.WaitGroup

	mu            sync.Mutex
	conns, broken int
	sent, lost    int
	reasons       []string
}

// startCalls opens a connection for each TCP path, and sends 100 datagrams a second along each UDP path.
func (f *flannelCluster) startCalls(t *testing.T, tcp, udp []dialPath) *openCalls {
	t.Helper()
	c := &openCalls{stop: make(chan struct{}), conns: len(tcp)}
	for _, p := range tcp {
		conn := f.open(t, "tcp", p)
		c.tasks.Go(func() { c.exchangeWords(p, conn) })
	}
	for _, p := range udp {
		conn := f.openUDP(t, p)
		c.tasks.Go(func() { c.countAnswers(p, conn) })
	}
	return c
}

func (f *flannelCluster) open(t *testing.T, network string, p dialPath) (conn net.Conn) {
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

// openUDP opens a UDP flow and waits for the first answer. Each attempt has a new socket, because the kernel keeps a wrong route for one
// that sends before kube-proxy has the Service's rules.
func (f *flannelCluster) openUDP(t *testing.T, p dialPath) net.Conn {
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

// exchangeWords sends words one after another and expects each word back.
func (c *openCalls) exchangeWords(p dialPath, conn net.Conn) {
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

// countAnswers sends datagrams and counts the answers.
func (c *openCalls) countAnswers(p dialPath, conn net.Conn) {
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

func (c *openCalls) ended() bool {
	select {
	case <-c.stop:
		return true
	default:
		return false
	}
}

// endCalls prints the losses. A lost connection fails the test, and so do lost datagrams unless they are expected.
func (c *openCalls) endCalls(t *testing.T, what string, lossy bool) {
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

// startTraffic connects pods of different nodes by address and by a Service, and with the machine outside the cluster.
func (f *flannelCluster) startTraffic(t *testing.T, from, to string) *openCalls {
	t.Helper()
	server, outside := f.services["server2"]["4"], f.places["outside"].address["4"]
	udp := []dialPath{{from + "1", server, 80}, {from + "1", outside, 8080},
		{"outside", "192.0.2.11", nodePort("server2")}, {"outside", "192.0.2.12", 8081},
	}
	if to == "last" { // the pods behind the service are deleted
		udp = udp[1:2]
	}
	tcp := append(f.tcpPaths(from, to), dialPath{from + "1", outside, echoPort})
	if f.backend == "host-gw" || from != "new" { // after the return to flannel, a vxlan node uses another source address for packets to pods
		tcp = append(tcp, dialPath{"node1", f.places[to+"2"].address["4"], echoPort})
	}
	for _, p := range f.tcpPaths(from, to) {
		udp = append(udp, dialPath{p.from, p.address, 8080})
	}
	return f.startCalls(t, tcp, udp)
}

// tcpPaths returns the paths between pods of all nodes.
func (f *flannelCluster) tcpPaths(from, to string) (paths []dialPath) {
	for _, a := range f.nodes {
		for _, b := range f.nodes {
			if a != b {
				paths = append(paths, dialPath{from + a, f.places[to+b].address["4"], echoPort})
			}
		}
	}
	return paths
}

// addPodsOf starts a pod on each node, which maker (Podlace or flannel) must have attached. Old pods, new pods and the machine outside the
// cluster must answer.
func (f *flannelCluster) addPodsOf(t *testing.T, name, maker string) {
	t.Helper()
	var objects []any
	for _, n := range f.nodes {
		objects = append(objects, map[string]any{"apiVersion": "v1", "kind": "Pod",
			"metadata": map[string]any{"name": name + n, "namespace": namespace},
			"spec": map[string]any{"nodeName": "node" + n, "terminationGracePeriodSeconds": 1,
				"containers": []any{map[string]any{"name": "a", "image": "podlace.test/busybox:1"}}}})
	}
	f.applyObjects(t, objects...)
	f.kubectl(t, "-n", namespace, "wait", "--for=condition=Ready", "pods", "--all", "--timeout=120s")
	f.addPods(t)
	f.checkLeases(t)
	for _, n := range f.nodes {
		serveName(t, name+n, f.places[name+n])
		serveEcho(t, f.places[name+n])
		records := f.runScript(t, "exec", "node"+n, "sh", "-c", "cat /run/podlace/cbr0/bridge-* 2>/dev/null || :")
		if made := strings.Contains(records, f.places[name+n].address["4"]); made != (maker == "Podlace") {
			t.Errorf("Podlace has a record of %s%s: %v, want the pod attached by %s", name, n, made, maker)
		}
	}
	for i, n := range f.nodes {
		other := f.nodes[(i+1)%len(f.nodes)]
		f.ask4(t, name+n, "server"+other)
		f.ask4(t, name+n, "server"+n)
		f.ask4(t, "client"+other, name+n)
		_, seen, err := f.askServer(name+n, "tcp", f.places["outside"].address["4"], 8080, dialLimit)
		if want := f.places["node"+n].address["4"]; err != nil || seen.String() != want {
			t.Errorf("%s%s reaches the machine outside as %s, want %s: %v", name, n, seen, want, err)
		}
	}
}

func (f *flannelCluster) ask4(t *testing.T, from, to string) {
	t.Helper()
	for _, network := range []string{"tcp", "udp"} {
		got, seen, err := f.askServer(from, network, f.places[to].address["4"], 8080, dialLimit)
		if want := f.places[from].address["4"]; err != nil || got != to || seen.String() != want {
			t.Errorf("%s to %s by %s: answered by %q to %s, want to %s: %v", from, to, network, got, seen, want, err)
		}
	}
}

// serveEcho sends the data of each connection back until the end of the test.
func serveEcho(t *testing.T, p *netPlace) {
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

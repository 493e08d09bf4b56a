// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestKubeProxy: all paths work after a kill of kube-proxy, and after a switch to the other mode and back. Paths without kube-proxy also
// work while it is stopped, and their connections survive all changes.
func TestKubeProxy(t *testing.T) {
	c := startCluster(t, "4 6", "PROXY=nftables", "BRIDGE_NF=1")
	c.setUpNetwork(t)
	w := newWorld(t, c)
	nftables, iptables := clusterSetup{proxy: "nftables"}, clusterSetup{proxy: "iptables"}
	w.testMatrix(t, nftables)
	var direct []netPath
	for _, p := range nftables.allPaths() {
		if !p.isProxied() {
			direct = append(direct, p)
		}
	}
	held := w.holdOpen(t, nftables, direct)
	for _, step := range []struct {
		title string
		then  clusterSetup
		do    func(t *testing.T, then clusterSetup)
	}{
		{"killed", nftables, c.killProxy},
		{"switched to iptables", iptables, c.setProxy},
		{"switched back", nftables, c.setProxy},
		{"cleaned up, then iptables", iptables, func(t *testing.T, then clusterSetup) { w.cleanProxy(t, then, direct) }},
		{"cleaned up, then nftables", nftables, func(t *testing.T, then clusterSetup) { w.cleanProxy(t, then, direct) }},
	} {
		t.Run(step.title, func(t *testing.T) {
			step.do(t, step.then)
			w.testMatrix(t, step.then)
		})
	}
	asked, lost := held()
	t.Logf("%d paths in %d families, connections held all the time: %d exchanges, %d lost", len(direct), len(w.families), asked, len(lost))
	if len(lost) > 0 {
		t.Errorf("lost, first %s", lost[0])
	}
}

// killProxy kills kube-proxy on each node and waits for the restarted process.
func (c *testCluster) killProxy(t *testing.T, s clusterSetup) {
	t.Helper()
	for _, n := range c.machineNames()[1:] {
		pid := c.proxyPID(t, n)
		c.runScript(t, "exec", n, "kill", "-KILL", pid)
		c.awaitProxy(t, n, s.proxy, pid)
	}
}

// cleanProxy stops kube-proxy on all nodes, removes its rules, checks the paths that do not need it, and starts it again.
func (w *testWorld) cleanProxy(t *testing.T, s clusterSetup, direct []netPath) {
	t.Helper()
	pids := map[string]string{}
	for _, n := range w.machineNames()[1:] {
		pids[n] = w.proxyPID(t, n)
		w.runScript(t, "exec", n, "sh", "-ec", `touch /run/node/stay-down; kill "$1"; while kill -0 "$1" 2>/dev/null; do sleep 0.05; done
			kube-proxy --cleanup`, "sh", pids[n])
		left := w.runScript(t, "exec", n, "sh", "-c", "nft list tables | grep kube-proxy; iptables-save | grep -e '-j KUBE-S' -e KUBE-SEP; :")
		if strings.TrimSpace(left) != "" {
			t.Errorf("%s: kube-proxy --cleanup has left\n%s", n, left)
		}
	}
	w.walkAll(t, s, direct)
	for _, n := range w.machineNames()[1:] {
		w.writeProxy(t, n, s)
		w.runScript(t, "exec", n, "rm", "/run/node/stay-down")
	}
	for _, n := range w.machineNames()[1:] {
		w.awaitProxy(t, n, s.proxy, pids[n])
	}
}

// holdOpen exchanges a message every 20 ms over a TCP connection and a UDP flow for each path and family. The returned function stops this,
// and returns the number of messages and the lost connections.
func (w *testWorld) holdOpen(t *testing.T, s clusterSetup, paths []netPath) func() (asked int, lost []string) {
	t.Helper()
	var group sync.WaitGroup
	var mutex sync.Mutex
	end, asked, lost := make(chan struct{}), 0, []string(nil)
	for _, p := range paths {
		for _, f := range w.families {
			if _, refused := p.expectedSource(s, f); refused != "" {
				continue
			}
			for _, network := range []string{"tcp", "udp"} {
				conn := w.connect(t, p, network, f)
				group.Go(func() {
					defer conn.Close()
					n, err := exchangeMessages(conn, end)
					mutex.Lock()
					defer mutex.Unlock()
					asked += n
					if err != nil {
						lost = append(lost, fmt.Sprintf("%s to %s, %s, IPv%s, exchange %d: %v", p.client, p.target, network, f, n, err))
					}
				})
			}
		}
	}
	stop := sync.OnceFunc(func() { close(end); group.Wait() })
	t.Cleanup(stop)
	return func() (int, []string) {
		stop()
		slices.Sort(lost)
		return asked, lost
	}
}

func (w *testWorld) connect(t *testing.T, p netPath, network, family string) (conn net.Conn) {
	t.Helper()
	err := w.places[p.from].Do(func() (err error) {
		conn, err = net.DialTimeout(network, net.JoinHostPort(w.targetOf(p, family), fmt.Sprint(p.port)), dialLimit)
		return err
	})
	if err == nil && network == "tcp" { // the server speaks first
		_ = conn.SetDeadline(time.Now().Add(dialLimit))
		_, err = conn.Read(make([]byte, 256))
	}
	if err != nil {
		t.Fatalf("%s to %s, %s, IPv%s: %v", p.client, p.target, network, family, err)
	}
	return conn
}

// exchangeMessages sends requests until the channel `end` is closed, or until a reply is missing.
func exchangeMessages(conn net.Conn, end <-chan struct{}) (n int, err error) {
	for ; ; n++ {
		select {
		case <-end:
			return n, nil
		case <-time.After(20 * time.Millisecond):
		}
		_ = conn.SetDeadline(time.Now().Add(dialLimit))
		_, err := conn.Write([]byte("?"))
		_, readErr := conn.Read(make([]byte, 256))
		if err := errors.Join(err, readErr); err != nil {
			return n, err
		}
	}
}

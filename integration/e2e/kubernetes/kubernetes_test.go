// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// TestDualStack: all paths (see netPath) work in both modes of kube-proxy, with br_netfilter on and off, and with masqueradeAll.
func TestDualStack(t *testing.T) {
	c := startCluster(t, "4 6", "PROXY=nftables", "BRIDGE_NF=1")
	c.setUpNetwork(t)
	w := newWorld(t, c)
	for _, v := range []struct {
		proxy, bridgeNF string
		masqueradeAll   bool
	}{
		{"nftables", "1", false}, {"nftables", "0", false}, {"nftables", "0", true},
		{"iptables", "0", true}, {"iptables", "0", false}, {"iptables", "1", false},
	} {
		t.Run(fmt.Sprintf("%s, bridge-nf-call-iptables %s, masqueradeAll %v", v.proxy, v.bridgeNF, v.masqueradeAll), func(t *testing.T) {
			s := clusterSetup{proxy: v.proxy, masqueradeAll: v.masqueradeAll}
			c.setBridgeNF(t, v.bridgeNF)
			c.setProxy(t, s)
			w.testMatrix(t, s)
		})
	}
}

// TestOneFamily: all paths of the test matrix work in a cluster with only IPv4 or only IPv6.
func TestOneFamily(t *testing.T) {
	for _, family := range []string{"4", "6"} {
		t.Run("IPv"+family, func(t *testing.T) {
			c := startCluster(t, family, "PROXY=iptables", "BRIDGE_NF=1")
			c.setUpNetwork(t)
			newWorld(t, c).testMatrix(t, clusterSetup{proxy: "iptables"})
		})
	}
}

var (
	modeLine       = regexp.MustCompile(`(?m)^mode: .*$`)
	masqueradeLine = regexp.MustCompile(`masqueradeAll: \w+`)
)

// writeProxy writes the kube-proxy configuration of a node and reports whether the file changed.
func (c *testCluster) writeProxy(t *testing.T, n string, s clusterSetup) bool {
	t.Helper()
	file := filepath.Join(c.dir, n, "proxy.yaml")
	old, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text := modeLine.ReplaceAll(old, []byte("mode: "+s.proxy))
	text = masqueradeLine.ReplaceAll(text, fmt.Appendf(nil, "masqueradeAll: %v", s.masqueradeAll))
	if bytes.Equal(old, text) {
		return false
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return true
}

// setProxy changes kube-proxy's configuration, and restarts it on each node where the file changed.
func (c *testCluster) setProxy(t *testing.T, s clusterSetup) {
	t.Helper()
	changed := map[string]string{}
	for _, n := range c.machineNames()[1:] {
		if pid := c.proxyPID(t, n); c.writeProxy(t, n, s) {
			changed[n] = pid
		}
	}
	for _, n := range c.machineNames()[1:] {
		c.awaitProxy(t, n, s.proxy, changed[n])
	}
}

// proxyPID returns the process ID of the node's kube-proxy.
func (c *testCluster) proxyPID(t *testing.T, n string) string {
	t.Helper()
	return strings.TrimSpace(c.runScript(t, "exec", n, "cat", "/run/node/proxy.pid"))
}

// awaitProxy waits until a new kube-proxy has changed the node's mode: the rules of the new mode have the matrix's last Service, and those
// of the old one are gone.
func (c *testCluster) awaitProxy(t *testing.T, node, mode, before string) {
	t.Helper()
	script := map[string]string{
		"nftables": "nft list table ip6 kube-proxy | grep -q 31005 && ! iptables-save -t nat | grep -q KUBE-SEP",
		"iptables": "ip6tables-save -t nat | grep -q 31005 && ! nft list table ip kube-proxy",
	}[mode]
	for end := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
		_, err := c.try("exec", "", node, "sh", "-c", script)
		if err == nil && c.proxyPID(t, node) != before {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("kube-proxy of %s is not in mode %s: %v", node, mode, err)
		}
	}
}

func (c *testCluster) setBridgeNF(t *testing.T, value string) {
	t.Helper()
	for _, n := range c.machineNames()[1:] {
		c.runScript(t, "exec", n, "sysctl", "-qw", "net.bridge.bridge-nf-call-iptables="+value, "net.bridge.bridge-nf-call-ip6tables="+value)
	}
}

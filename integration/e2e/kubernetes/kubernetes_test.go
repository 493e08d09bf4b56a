// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"
)

// TestDualStack: all paths work with kube-proxy in both modes and with br_netfilter on and off.
func TestDualStack(t *testing.T) {
	c := start(t, "4 6", "PROXY=nftables", "BRIDGE_NF=1")
	c.network(t)
	w := newWorld(t, c)
	for _, v := range []struct{ proxy, bridgeNF string }{{"nftables", "1"}, {"nftables", "0"}, {"iptables", "0"}, {"iptables", "1"}} {
		t.Run(v.proxy+", bridge-nf-call-iptables "+v.bridgeNF, func(t *testing.T) {
			c.setProxy(t, v.proxy)
			c.setBridgeNF(t, v.bridgeNF)
			w.matrix(t, v.proxy)
		})
	}
}

// TestOneFamily: the paths work in a cluster that has IPv4 alone or IPv6 alone.
func TestOneFamily(t *testing.T) {
	for _, family := range []string{"4", "6"} {
		t.Run("IPv"+family, func(t *testing.T) {
			c := start(t, family, "PROXY=iptables", "BRIDGE_NF=1")
			c.network(t)
			newWorld(t, c).matrix(t, "iptables")
		})
	}
}

var modeLine = regexp.MustCompile(`(?m)^mode: .*$`)

// setProxy switches kube-proxy's mode; a kube-proxy whose configuration changes ends, and is started anew.
func (c *cluster) setProxy(t *testing.T, mode string) {
	t.Helper()
	for _, n := range c.machines()[1:] {
		file := filepath.Join(c.dir, n, "proxy.yaml")
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if string(modeLine.Find(text)) == "mode: "+mode {
			continue
		}
		if err := os.WriteFile(file, modeLine.ReplaceAll(text, []byte("mode: "+mode)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range c.machines()[1:] {
		c.awaitProxy(t, n, mode)
	}
}

// awaitProxy waits until the node has the rules of the mode for the last service, and none of the other mode.
func (c *cluster) awaitProxy(t *testing.T, node, mode string) {
	t.Helper()
	script := map[string]string{
		"nftables": "nft list table ip6 kube-proxy | grep -q 31005 && ! iptables-save -t nat | grep -q KUBE-SEP",
		"iptables": "ip6tables-save -t nat | grep -q 31005 && ! nft list table ip kube-proxy",
	}[mode]
	for end := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
		_, err := c.try("exec", "", node, "sh", "-c", script)
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("kube-proxy of %s is not in mode %s: %v", node, mode, err)
		}
	}
}

func (c *cluster) setBridgeNF(t *testing.T, value string) {
	t.Helper()
	for _, n := range c.machines()[1:] {
		c.run(t, "exec", n, "sysctl", "-qw", "net.bridge.bridge-nf-call-iptables="+value, "net.bridge.bridge-nf-call-ip6tables="+value)
	}
}

// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// addKubeProxyRules creates the masquerade rules of kube-proxy in iptables mode.
func addKubeProxyRules(t *testing.T) {
	t.Helper()
	for _, program := range []string{"iptables", "ip6tables"} {
		nat := func(args string) string { return program + " -w -t nat " + args + "\n" }
		harness.Shell(t, nat("-N KUBE-MARK-MASQ")+nat("-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000")+nat("-N KUBE-POSTROUTING")+
			nat("-A POSTROUTING -j KUBE-POSTROUTING")+nat("-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN")+
			nat("-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000")+nat("-A KUBE-POSTROUTING -j MASQUERADE"))
		t.Cleanup(func() {
			harness.Shell(t, nat("-D POSTROUTING -j KUBE-POSTROUTING")+nat("-F KUBE-POSTROUTING")+nat("-X KUBE-POSTROUTING")+
				nat("-F KUBE-MARK-MASQ")+nat("-X KUBE-MARK-MASQ"))
		})
	}
}

// eachBackend runs a test once for each backend of portmap. edits are the text replacements that set it in the conflist.
func eachBackend(t *testing.T, test func(t *testing.T, edits ...string)) {
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) {
			if backend == "iptables" {
				harness.Program(t, "iptables")
			}
			test(t, `"type": "portmap"`, `"type": "portmap", "backend": "`+backend+`"`)
		})
	}
}

// TestBehindKubernetesDocs runs the unchanged hostPort conflist of the Kubernetes documentation.
func TestBehindKubernetesDocs(t *testing.T) {
	harness.Program(t, "iptables")
	addKubeProxyRules(t)
	b := newBehind(t, "kubernetes-hostport.conflist", harness.HostPort())
	b.runLife(t, func() {
		b.checkTraffic(t, false, false)
		if rules := harness.Shell(t, "iptables -w -t nat -S"); !strings.Contains(rules, "-j KUBE-MARK-MASQ") ||
			strings.Contains(rules, "-j CNI-HOSTPORT-SETMARK") {
			t.Errorf("the marks differ from kube-proxy's:\n%s", rules)
		}
	})
}

// TestBehindKubernetesDocsNFT: kube-proxy in nftables mode has no chain KUBE-MARK-MASQ, so ADD with it as externalSetMarkChain fails and
// leaves no state. The error names the chain and the remedy. Without this key, the conflist works.
func TestBehindKubernetesDocsNFT(t *testing.T) {
	harness.Program(t, "iptables")
	harness.Program(t, "nft")
	harness.Shell(t, `nft 'table ip kube-proxy { chain mark-for-masquerade { meta mark set mark or 0x4000; }; }'`)
	t.Cleanup(func() { harness.Shell(t, "nft delete table ip kube-proxy") })
	const key = `"externalSetMarkChain": "KUBE-MARK-MASQ"`
	b := newBehind(t, "kubernetes-hostport.conflist", harness.HostPort(), ",\n      "+key, "")
	b.runLife(t, func() { b.checkTraffic(t, false, false) })

	docs := newBehindOn(t, b, "kubernetes-hostport.conflist")
	_, err := docs.Do("ADD", docs.rtWeb, nil)
	var failure *types.Error
	if !errors.As(err, &failure) || failure.Code != types.ErrInvalidNetworkConfig ||
		!strings.Contains(failure.Msg, "externalSetMarkChain KUBE-MARK-MASQ: no such chain in the nat table") ||
		!strings.Contains(failure.Details, "kube-proxy") || !strings.Contains(failure.Details, "leave the key out") {
		t.Errorf("ADD: %v", err)
	}
	docs.Must(t, "DEL", docs.rtWeb)
	docs.oracle.Clean(t, "an ADD that failed")
}

// newBehindOn opens another conflist on the same test machines.
func newBehindOn(t *testing.T, b *behindLab, file string) *behindLab {
	t.Helper()
	other := *b
	other.Network = openBehind(t, readBehind(t, file))
	return &other
}

// TestBehindKubernetesShaping runs the unchanged bandwidth conflist of the Kubernetes documentation.
func TestBehindKubernetesShaping(t *testing.T) {
	const rate = 16_000_000
	b := newBehind(t, "kubernetes-shaping.conflist", map[string]any{"bandwidth": object{
		"ingressRate": rate, "ingressBurst": 1<<32 - 1, "egressRate": rate, "egressBurst": 1<<32 - 1}})
	b.runLife(t, func() { checkLimitsHold(t, b.web, harness.IPv4Of(t, b.web), rate) })
}

// checkLimitsHold sends, from the node to a pod and back, what the limit lets pass in one second. Neither may take less than 0.6 s.
func checkLimitsHold(t *testing.T, pod *sandbox.Pod, ip string, rate int) {
	t.Helper()
	const port = "81"
	address := net.JoinHostPort(ip, port)
	var l net.Listener
	if err := harness.Networked(pod, func() (err error) { l, err = net.Listen("tcp", ":"+port); return err }); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	size := int64(rate / 8)
	go func() { // the server reads all bytes, and then sends the same number of bytes
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.CopyN(io.Discard, c, size)
			_, _ = c.Write([]byte{0})
			_, _ = c.Write(make([]byte, size))
			_ = c.Close()
		}
	}()
	c, err := net.DialTimeout("tcp", address, harness.TrafficLimit)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(harness.CallLimit))
	for direction, transfer := range []func() error{
		func() error {
			_, err := c.Write(make([]byte, size))
			_, err2 := io.ReadFull(c, make([]byte, 1))
			return errors.Join(err, err2)
		},
		func() error { _, err := io.CopyN(io.Discard, c, size); return err },
	} {
		start := time.Now()
		if err := transfer(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took < 600*time.Millisecond {
			t.Errorf("%s: the bytes of one second took %v", [...]string{"to the pod", "from the pod"}[direction], took)
		}
	}
}

// TestBehindCalico runs portmap and bandwidth after a main plugin with /32 and /128 addresses and no bridge.
func TestBehindCalico(t *testing.T) {
	eachBackend(t, func(t *testing.T, edits ...string) {
		b := newBehind(t, "calico-dual.conflist", harness.Capabilities(), edits...)
		b.runLife(t, func() { b.checkTraffic(t, true, false) })
	})
}

// TestBehindPTP runs portmap and bandwidth after the reference plugin ptp.
func TestBehindPTP(t *testing.T) {
	eachBackend(t, func(t *testing.T, edits ...string) {
		b := newBehind(t, "ptp.conflist", harness.Capabilities(), edits...)
		b.runLife(t, func() { b.checkTraffic(t, true, false) })
	})
}

// TestBehindNerdctl runs Podlace's plugins between reference plugins, in the order of nerdctl's default network.
func TestBehindNerdctl(t *testing.T) {
	harness.Program(t, "iptables")
	eachBackend(t, func(t *testing.T, edits ...string) {
		b := newBehind(t, "nerdctl.conflist", harness.HostPort(), edits...)
		b.runLife(t, func() { b.checkTraffic(t, false, false) })
	})
}

// TestBehindNerdctlDrop: FORWARD has the policy drop, as Docker or ufw may set it. The reference plugin firewall accepts packets from pods
// and their replies only, so other machines reach a hostPort once an administrator accepts the pods' subnet.
func TestBehindNerdctlDrop(t *testing.T) {
	harness.Program(t, "iptables")
	eachBackend(t, func(t *testing.T, edits ...string) {
		b := newBehind(t, "nerdctl.conflist", harness.HostPort(), edits...)
		harness.Shell(t, "iptables -w -P FORWARD DROP")
		t.Cleanup(func() { harness.Shell(t, "iptables -w -P FORWARD ACCEPT") })
		b.oracle.Rebase(t)
		b.runLife(t, func() {
			b.checkTraffic(t, false, false, "from another machine")
			harness.Shell(t, "iptables -A FORWARD -d 10.4.0.0/24 -j ACCEPT; iptables -A FORWARD -s 10.4.0.0/24 -j ACCEPT")
			b.checkTraffic(t, false, false)
			harness.Shell(t, "iptables -D FORWARD -d 10.4.0.0/24 -j ACCEPT; iptables -D FORWARD -s 10.4.0.0/24 -j ACCEPT")
			b.Must(t, "CHECK", b.rtWeb)
		})
	})
}

// TestBehindWithoutHairpin: without hairpinMode, everybody but the pod itself reaches its hostPort.
func TestBehindWithoutHairpin(t *testing.T) {
	conflist := strings.NewReplacer(`"bandwidth": true`, `"portMappings": true`, `"bandwidth"`, `"portmap"`).Replace(ownBridge)
	eachBackend(t, func(t *testing.T, edits ...string) {
		b := behindOf(t, strings.NewReplacer(edits...).Replace(conflist), harness.HostPort())
		b.runLife(t, func() { b.checkTraffic(t, false, false, "from the pod itself") })
	})
}

// TestBehindMacvlan: a node and its macvlan pods cannot reach each other over their shared link, so hostPorts do not work, which CHECK
// cannot detect. Other machines reach a pod at its own address.
func TestBehindMacvlan(t *testing.T) {
	needMacvlan(t)
	eachBackend(t, func(t *testing.T, edits ...string) {
		b := newBehind(t, "macvlan.conflist", harness.HostPort(), edits...)
		b.runLife(t, func() {
			b.checkTraffic(t, false, false, "from another machine", "from the node", "from 127.0.0.1", "from another pod", "from the pod itself")
			b.checkOwnAddress(t)
		})
	})
}

// checkOwnAddress connects from another machine to the pod's own address.
func (b *behindLab) checkOwnAddress(t *testing.T) {
	t.Helper()
	server, err := harness.ServeClientAddress(b.web, 80)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	if seen, err := harness.Dial(b.lan, harness.IPv4Of(t, b.web)+":80", harness.TrafficLimit); err != nil || seen != harness.LANV4 {
		t.Errorf("the pod's own address: %v, the pod sees %s", err, seen)
	}
}

// TestBehindMacvlanShim: a node with a macvlan link of its own reaches its macvlan pods. With masqAll, their replies return through it.
func TestBehindMacvlanShim(t *testing.T) {
	needMacvlan(t)
	eachBackend(t, func(t *testing.T, edits ...string) {
		b := newBehind(t, "macvlan.conflist", harness.HostPort(),
			append(edits, `"capabilities": {"portMappings": true}`, `"masqAll": true, "capabilities": {"portMappings": true}`)...)
		harness.Shell(t, "ip link add shim0 link lan0 type macvlan mode bridge; ip addr add 192.0.2.3/32 dev shim0; ip link set shim0 up; ip route add 192.0.2.64/26 dev shim0; sysctl -qw net.ipv4.ip_forward=1")
		t.Cleanup(func() { _ = exec.Command("ip", "link", "del", "shim0").Run() })
		warm := harness.NewPod(t, fmt.Sprint(b.web.Name, "-warm"))
		rt := harness.Named(warm, harness.HostPort())
		b.Must(t, "ADD", rt)
		b.Must(t, "DEL", rt)
		b.oracle = harness.Watch(t, b.web, b.client)
		b.runLife(t, func() { b.checkTraffic(t, false, true) })
	})
}

func needMacvlan(t *testing.T) {
	t.Helper()
	harness.Program(t, "ip")
	if out, err := exec.Command("/bin/sh", "-ec",
		"ip link add mvt0 type veth peer mvt1; ip link add mvt2 link mvt0 type macvlan; ip link del mvt0").CombinedOutput(); err != nil {
		_ = exec.Command("ip", "link", "del", "mvt0").Run()
		t.Skipf("SKIPPED: this kernel has no macvlan: %s", out)
	}
}

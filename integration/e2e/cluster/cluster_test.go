// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// clusterLimit is the time limit of a connection in a cluster. Successful connections need much less than this limit.
const clusterLimit = 30 * time.Second

// clusterNode is a network namespace with its own state folders, podCIDRs and routes.
type clusterNode struct {
	*harness.Network
	ns        *sandbox.Pod
	addresses [2]string // of the node, IPv4 and IPv6
	podCIDRs  []string
}

// outsideAddrs are the addresses of a machine on the nodes' link, the tests' namespace. It is their router and has no routes to pods.
var outsideAddrs = [2]string{"192.0.2.254", "2001:db8:92::254"}

// newCluster creates nodes with podCIDRs on one link and a shipped configuration, with the routes of conf/README.md.
func newCluster(t *testing.T, file string, podCIDRs ...[]string) (nodes []*clusterNode) {
	t.Helper()
	harness.Need(t, "bridge", "host-local", "portmap", "bandwidth")
	for _, name := range []string{"ip", "unshare", "nsenter", "mount"} {
		harness.Program(t, name)
	}
	harness.Shell(t, fmt.Sprintf(`
		ip link add lan type bridge; ip link set lan up
		ip addr add %s/24 dev lan; ip -6 addr add %s/64 dev lan nodad`, outsideAddrs[0], outsideAddrs[1]))
	t.Cleanup(func() { harness.Shell(t, "ip link del lan") })
	for i, cidrs := range podCIDRs {
		nodes = append(nodes, newClusterNode(t, i+1, cidrs))
		nodes[i].openConflist(t, file)
	}
	for _, n := range nodes {
		for _, other := range nodes {
			for family := range other.podCIDRs {
				if n != other {
					harness.Shell(t, fmt.Sprintf("ip -n %s route replace %s via %s", n.ns.Name, other.podCIDRs[family], other.addresses[family]))
				}
			}
		}
	}
	return nodes
}

func newClusterNode(t *testing.T, i int, podCIDRs []string) *clusterNode {
	t.Helper()
	n := &clusterNode{ns: harness.NewPod(t, fmt.Sprintf("%s-node%d", harness.Plain(t), i)),
		addresses: [2]string{fmt.Sprintf("192.0.2.%d", i), fmt.Sprintf("2001:db8:92::%d", i)},
		podCIDRs:  podCIDRs}
	harness.Shell(t, fmt.Sprintf(`
		ip link add lan%[2]d mtu 1400 master lan type veth peer name eth0 mtu 1400 netns %[1]s; ip link set lan%[2]d up
		ip -n %[1]s link set lo up; ip -n %[1]s addr add %[3]s/24 dev eth0
		ip -n %[1]s -6 addr add %[4]s/64 dev eth0 nodad; ip -n %[1]s link set eth0 up
		ip -n %[1]s route add default via %[5]s; ip -n %[1]s -6 route add default via %[6]s`,
		n.ns.Name, i, n.addresses[0], n.addresses[1], outsideAddrs[0], outsideAddrs[1]))
	t.Cleanup(func() { harness.Shell(t, fmt.Sprintf("ip link del lan%d", i)) })
	return n
}

// openConflist opens a shipped configuration with the node's podCIDR as its subnet. Scripts in place of the plugins run the real ones in
// the node's namespace with its state folders.
func (n *clusterNode) openConflist(t *testing.T, file string) {
	t.Helper()
	state := t.TempDir()
	const cluster = `"clusterCIDRs":["10.244.0.0/16","fd00:10:244::/56"]`
	node := `{"podCIDRs":["` + strings.Join(n.podCIDRs, `","`) + `"],` + cluster + `}`
	for dir, file := range map[string]string{"run": node, "lib": "", "bin": ""} {
		if err := os.Mkdir(filepath.Join(state, dir), 0o700); err != nil {
			t.Fatal(err)
		}
		if file != "" {
			if err := os.WriteFile(filepath.Join(state, dir, "node.json"), []byte(file), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	harness.Shell(t, "mkdir -p -m 700 /run/podlace /var/lib/cni")
	for _, plugin := range []string{"bridge", "portmap", "bandwidth"} {
		script := fmt.Sprintf("#!/bin/sh\nexec unshare --mount sh -ec 'mount --bind %[1]s/run /run/podlace; mount --bind %[1]s/lib /var/lib/cni; exec nsenter --net=%[2]s %[3]s'\n",
			state, n.ns.Path, filepath.Join(harness.BinDir(), plugin))
		if err := os.WriteFile(filepath.Join(state, "bin", plugin), []byte(script), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	conflist, err := conf.Conflist(file)
	if err != nil {
		t.Fatal(err)
	}
	conflist = bytes.ReplaceAll(conflist, []byte("10.42.0.0/24"), []byte(n.podCIDRs[0]))
	if n.Network, err = harness.OpenNetwork(conflist, t.TempDir(), nil); err != nil {
		t.Fatal(err)
	}
	n.CNI = libcni.NewCNIConfigWithCacheDir([]string{filepath.Join(state, "bin")}, t.TempDir(), n.Exec())
}

// attachPod attaches a pod to the node until the end of the test. Its port 80 answers each client with the client's address.
func (n *clusterNode) attachPod(t *testing.T, name string, caps map[string]any) *sandbox.Pod {
	t.Helper()
	pod := harness.NewPod(t, harness.Plain(t)+"-"+name)
	rt := harness.Named(pod, caps)
	n.Must(t, "ADD", rt)
	t.Cleanup(func() { n.Must(t, "DEL", rt) })
	n.Must(t, "CHECK", rt)
	return serveClientAddress(t, pod)
}

// serveClientAddress starts a server on port 80 of a pod, or of the tests' namespace if it is nil, that answers each client with the
// client's address.
func serveClientAddress(t *testing.T, on *sandbox.Pod) *sandbox.Pod {
	t.Helper()
	server, err := harness.ServeClientAddress(on, 80)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	return on
}

// TestKubernetesConflistKeepsPodAddresses checks who sees which address, as in conf/README.md, on two nodes with the shipped configuration
// for Kubernetes. The other node's pods must see the sender's own address, as Kubernetes' network model and its NoSNAT test require.
func TestKubernetesConflistKeepsPodAddresses(t *testing.T) {
	keepPodAddresses(t, newCluster(t, "10-podlace-kubernetes.conflist", []string{"10.244.1.0/24", "fd00:10:244:1::/64"},
		[]string{"10.244.2.0/24", "fd00:10:244:2::/64"}))
}

// TestK3sConflistKeepsPodAddresses checks the same with the IPv4 configuration for k3s.
func TestK3sConflistKeepsPodAddresses(t *testing.T) {
	keepPodAddresses(t, newCluster(t, "10-podlace-k3s.conflist", []string{"10.42.0.0/24"}, []string{"10.42.1.0/24"}))
}

func keepPodAddresses(t *testing.T, nodes []*clusterNode) {
	one, two := nodes[0], nodes[1]
	web, client := one.attachPod(t, "web", harness.HostPort()), one.attachPod(t, "client", nil)
	other := two.attachPod(t, "other", nil)
	serveClientAddress(t, nil)
	serveClientAddress(t, one.ns)
	serveClientAddress(t, two.ns)
	for i, family := range []string{"-4", "-6"}[:len(one.podCIDRs)] {
		webIP, clientIP, otherIP := harness.AddressOf(t, web, family), harness.AddressOf(t, client, family), harness.AddressOf(t, other, family)
		for _, path := range []struct {
			title    string
			from     *sandbox.Pod
			to, port string
			seen     string
		}{
			{"pod to pod of its node", client, webIP, "80", clientIP},
			{"pod to pod of another node", client, otherIP, "80", clientIP},
			{"pod of another node to pod", other, webIP, "80", otherIP},
			{"pod to its node", client, one.addresses[i], "80", clientIP},
			{"pod to another node", client, two.addresses[i], "80", one.addresses[i]},
			{"pod to outside", client, outsideAddrs[i], "80", one.addresses[i]},
			{"node to pod of another node", two.ns, webIP, "80", two.addresses[i]},
			{"another node to hostPort", two.ns, one.addresses[i], "8080", two.addresses[i]},
			{"outside to hostPort", nil, one.addresses[i], "8080", outsideAddrs[i]},
			{"pod of another node to hostPort", other, one.addresses[i], "8080", two.addresses[i]},
			{"pod to hostPort of its node", client, one.addresses[i], "8080", clientIP},
		} {
			seen, err := harness.Dial(path.from, net.JoinHostPort(path.to, path.port), clusterLimit)
			if err != nil || seen != path.seen {
				t.Errorf("%s %s: seen as %q, %v; want %s", path.title, family, seen, err, path.seen)
			}
		}
	}
	if mtu := harness.Shell(t, "ip -n "+client.Name+" -o link show dev eth0"); len(one.podCIDRs) == 2 && !strings.Contains(mtu, " mtu 1400 ") {
		t.Errorf("the pod's MTU is not that of the node's uplink: %s", mtu)
	}
}

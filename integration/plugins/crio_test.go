// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/meter"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// crioNode is a node whose emulated runtime calls the plugins like CRI-O 1.36.
type crioNode struct {
	*harness.Network
	conflist []byte
	cache    string
	lan      *sandbox.Pod
	pods     map[*sandbox.Pod]*libcni.RuntimeConf
}

const (
	crioIngress = 40 // Mbit/s, as the pod sees them
	crioEgress  = 20
)

// crioRuntimeConf returns what CRI-O passes to libcni for a pod with both limits, which never has portMappings. more adds values of other
// runtimes.
func crioRuntimeConf(pod *sandbox.Pod, more map[string]any) *libcni.RuntimeConf {
	const noBurst = 34359738359 // burst that CRI-O passes if the pod has none
	rt := &libcni.RuntimeConf{
		ContainerID: strings.ToLower(pod.Name), NetNS: pod.Path, IfName: "eth0",
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_NAME", pod.Name},
			{"K8S_POD_INFRA_CONTAINER_ID", strings.ToLower(pod.Name)},
			{"K8S_POD_UID", "0b5b7a1c-0000-4000-8000-000000000000"}},
		CapabilityArgs: map[string]any{
			"bandwidth": harness.Object{"ingressRate": crioIngress * 1_000_000, "ingressBurst": noBurst, "egressRate": crioEgress * 1_000_000,
				"egressBurst": noBurst},
			"io.kubernetes.cri.pod-annotations": harness.Object{
				"kubernetes.io/ingress-bandwidth": "40M", "kubernetes.io/egress-bandwidth": "20M"},
			"cgroupPath": "/kubepods/besteffort/pod0b5b7a1c",
		},
	}
	for key, value := range more {
		rt.CapabilityArgs[key] = value
	}
	return rt
}

// startCRIO does what CRI-O does at its start: VERSION of each plugin, STATUS twice, GC with all live pods, and CHECK of each.
func (n *crioNode) startCRIO(t *testing.T) {
	t.Helper()
	var err error
	if n.Network, err = harness.OpenNetwork(n.conflist, n.cache, nil); err != nil {
		t.Fatal(err)
	}
	for _, p := range n.List.Plugins {
		if _, err := n.CNI.GetVersionInfo(t.Context(), p.Network.Type); err != nil {
			t.Errorf("VERSION of %s: %v", p.Network.Type, err)
		}
	}
	n.Must(t, "STATUS", nil)
	n.Must(t, "STATUS", nil)
	var valid []types.GCAttachment
	for _, rt := range n.pods {
		valid = append(valid, types.GCAttachment{ContainerID: rt.ContainerID, IfName: rt.IfName})
	}
	n.Must(t, "GC", nil, valid...)
	for pod, rt := range n.pods {
		if _, err := n.Do("CHECK", rt, nil); err != nil {
			t.Errorf("CHECK of %s: %v; CRI-O would drop its address and the kubelet would recreate the pod", pod.Name, err)
		}
	}
}

// runPod emulates RunPodSandbox: ADD and then CHECK of all plugins.
func (n *crioNode) runPod(t *testing.T, pod *sandbox.Pod, more map[string]any) {
	t.Helper()
	n.pods[pod] = crioRuntimeConf(pod, more)
	t.Cleanup(func() { _, _ = n.Do("DEL", n.pods[pod], nil) })
	n.Must(t, "ADD", n.pods[pod])
	n.Must(t, "CHECK", n.pods[pod])
}

// checkWorks checks each pod's limits, and that the node masquerades IPv4 and IPv6 packets to another machine.
func (n *crioNode) checkWorks(t *testing.T) {
	t.Helper()
	for pod := range n.pods {
		for to, want := range map[string]string{harness.LANV4: harness.NodeV4, harness.LANV6: harness.NodeV6} {
			if got, err := harness.Dial(pod, net.JoinHostPort(to, "7000"), harness.TrafficLimit); err != nil || got != want {
				t.Errorf("%s -> %s: seen as %q, %v; want %s", pod.Name, to, got, err, want)
			}
		}
		inPod := netip.MustParseAddr(harness.IPv4Of(t, pod))
		for what, c := range map[string]struct {
			flow meter.Flow
			mbit float64
		}{
			"receives": {meter.Flow{To: pod.Do, Listen: netip.AddrPortFrom(inPod, 0)}, crioIngress},
			"sends":    {meter.Flow{From: pod.Do, Listen: netip.MustParseAddrPort("10.71.0.1:0")}, crioEgress},
		} {
			c.flow.Protocol, c.flow.Duration, c.flow.Rate = meter.UDP, time.Second, 3e6*c.mbit
			r, err := meter.Run(t.Context(), c.flow)
			if got := r.Mean.Wire / 1e6; err != nil || got <= 0 || got > c.mbit*1.1 {
				t.Errorf("%s %s %.2f Mbit/s, %v; want at most %.0f", pod.Name, what, got, err, c.mbit)
			}
		}
	}
}

// TestRestartAfterFlush (F-21): after a flush of the firewall and a loss of qdiscs, STATUS and GC at the start of CRI-O restore masquerade
// and limits, so that CHECK, which restores nothing, succeeds.
func TestRestartAfterFlush(t *testing.T) {
	harness.Program(t, "nft")
	harness.Program(t, "tc")
	for what, more := range map[string]map[string]any{"CRI-O": nil, "hostPorts": harness.HostPort()} {
		for _, backend := range []string{"nftables", "iptables"} {
			t.Run(what+" "+backend, func(t *testing.T) {
				harness.NeedBackend(t, backend)
				harness.Need(t, "portmap", "bandwidth")
				conflist := strings.Replace(string(harness.ChainOf(t, "1.1.0", backend)), `"ipMasq":true`, `"ipMasq":true,"antiSpoof":true`, 1)
				n := &crioNode{conflist: []byte(conflist), cache: t.TempDir(), lan: harness.NewLAN(t), pods: map[*sandbox.Pod]*libcni.RuntimeConf{}}
				server, err := harness.ServeClientAddress(n.lan, 7000)
				if err != nil {
					t.Fatal(err)
				}
				defer server.Close()
				n.startCRIO(t)
				web, client := harness.NewPod(t, harness.Plain(t)+"-web"), harness.NewPod(t, harness.Plain(t)+"-client")
				n.runPod(t, web, more)
				n.runPod(t, client, nil)
				n.checkWorks(t)

				harness.Shell(t, "nft flush ruleset")
				if got, err := harness.Dial(web, net.JoinHostPort(harness.LANV4, "7000"), harness.Patience(true)); err == nil {
					t.Errorf("after the flush a pod is still seen as %s: the flush had no effect on masquerade", got)
				}
				deleteQdiscs(t)
				for pod, rt := range n.pods {
					if _, err := n.Do("CHECK", rt, nil); err == nil {
						t.Errorf("CHECK of %s does not report the flushed rules", pod.Name)
					}
				}
				n.startCRIO(t)
				n.checkWorks(t)
				if more != nil {
					page, err := harness.Serve(web, 80)
					if err != nil {
						t.Fatal(err)
					}
					defer page.Close()
					harness.Reach(t, n.lan, net.JoinHostPort(harness.NodeV4, "8080"), web)
					harness.Reach(t, nil, "127.0.0.1:8080", web)
				}
				for _, rt := range n.pods {
					n.Must(t, "DEL", rt)
				}
			})
		}
	}
}

// TestRestartWithAntiSpoof enables antiSpoof and restarts CRI-O while pods run. Their CHECK succeeds with the new configuration and with
// the one cached at ADD. Only later pods are protected against spoofing. DEL works with both for all.
func TestRestartWithAntiSpoof(t *testing.T) {
	open := harness.ChainOf(t, "1.1.0", "nftables")
	guarded := []byte(strings.Replace(string(open), `"ipMasq":true`, `"ipMasq":true,"antiSpoof":true`, 1))
	n := &crioNode{conflist: open, cache: t.TempDir(), lan: harness.NewLAN(t), pods: map[*sandbox.Pod]*libcni.RuntimeConf{}}
	server, err := harness.ServeClientAddress(n.lan, 7000)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	pods := map[string]*sandbox.Pod{}
	for _, name := range []string{"old1", "old2", "new1", "new2"} {
		if name == "new1" {
			n.conflist = guarded
		}
		n.startCRIO(t)
		pods[name] = harness.NewPod(t, harness.Plain(t)+"-"+name)
		n.runPod(t, pods[name], nil)
	}
	for _, conflist := range [][]byte{guarded, open} {
		n.conflist = conflist
		n.startCRIO(t)
		n.checkWorks(t)
	}
	for name, conflist := range map[string][]byte{"old1": open, "new1": open, "old2": guarded, "new2": guarded} {
		if n.Network, err = harness.OpenNetwork(conflist, n.cache, nil); err != nil {
			t.Fatal(err)
		}
		n.Must(t, "DEL", n.pods[pods[name]])
	}
}

// deleteQdiscs removes the token buckets of all pods, and the redirect filter of one pod.
func deleteQdiscs(t *testing.T) {
	t.Helper()
	const script = `for link in $(ip -br link | grep -o '^\(veth\|bwp\)[0-9a-f]*'); do tc qdisc del dev $link root; done
		link=$(ip -br link | grep -o '^veth[0-9a-f]*' | head -1); tc qdisc del dev $link clsact; tc qdisc show | grep -c tbf`
	if out, _ := exec.Command("sh", "-c", script).Output(); strings.TrimSpace(string(out)) != "0" {
		t.Fatalf("token buckets remain: %s", out)
	}
}

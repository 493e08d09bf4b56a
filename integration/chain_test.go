// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"sync"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/pkg/kernel/kerneltest"
	"github.com/podlace/podlace/pkg/sandbox"
)

// chainOf is the conflist of a node: bridge with host-local and masquerade, then
// those of portmap and bandwidth that are in the folder under test.
func chainOf(t testing.TB, version, backend string) []byte {
	t.Helper()
	need(t, "bridge", "host-local")
	plugins := []any{object{
		"type": "bridge", "bridge": "chain0", "isGateway": true, "isDefaultGateway": true, "hairpinMode": true,
		"ipMasq": true, "ipMasqBackend": backend,
		"ipam": object{"type": "host-local", "ranges": []any{
			[]any{object{"subnet": "10.71.0.0/24"}}, []any{object{"subnet": "fd71::/64"}},
		}},
	}}
	if hasChained(t, "portmap") {
		plugins = append(plugins, object{"type": "portmap", "backend": backend, "snat": true, "capabilities": object{"portMappings": true}})
	}
	if hasChained(t, "bandwidth") {
		plugins = append(plugins, object{"type": "bandwidth", "capabilities": object{"bandwidth": true}})
	}
	return encode(object{"cniVersion": version, "name": "chain", "plugins": plugins})
}

func hasChained(t testing.TB, plugin string) bool {
	t.Helper()
	if present(binDir(), plugin) {
		return true
	}
	t.Logf("SKIPPED part of the chain: no %s in %s", plugin, binDir())
	return false
}

// capabilities are what containerd sends for a pod with one port and two limits.
func capabilities() map[string]any {
	return map[string]any{
		"portMappings": []any{object{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}},
		"bandwidth": object{
			"ingressRate": 1_000_000_000, "ingressBurst": 1<<32 - 1, "egressRate": 1_000_000_000, "egressBurst": 1<<32 - 1,
		},
	}
}

// attachment is how a runtime names a pod to libcni.
func attachment(pod *sandbox.Pod, id string, caps map[string]any) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{
		ContainerID: id, NetNS: pod.Path, IfName: "eth0", CapabilityArgs: caps,
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_NAME", "web-0"}},
	}
}

// must runs one verb of a chain and fails the test on an error.
func (n *network) must(t testing.TB, verb string, rt *libcni.RuntimeConf, valid ...types.GCAttachment) object {
	t.Helper()
	result, err := n.do(verb, rt, valid)
	if err != nil {
		t.Fatalf("chain %s in version %s: %v\n%s", verb, n.list.CNIVersion, err, n.stderr.String())
	}
	if result == nil {
		return nil
	}
	return rawObject(t, string(encode(result)))
}

func TestChain(t *testing.T) {
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		t.Run(version, func(t *testing.T) { chainLife(t, version, "nftables") })
	}
	t.Run("iptables", func(t *testing.T) {
		if _, err := exec.LookPath("iptables"); err != nil {
			t.Skip("SKIPPED: no iptables program")
		}
		chainLife(t, "1.0.0", "iptables")
	})
}

// chainLife takes two pods through everything that a runtime does in a version.
func chainLife(t *testing.T, version, backend string) {
	n, err := openNetwork(chainOf(t, version, backend), t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	warm, web, client := newPod(t, "chain-warm"), newPod(t, "chain-web"), newPod(t, "chain-client")
	rtWarm, rtWeb, rtClient := attachment(warm, "warm", capabilities()), attachment(web, "web", capabilities()), attachment(client, "client", nil)
	n.must(t, "ADD", rtWarm)
	n.must(t, "DEL", rtWarm)
	before := watch(t, web, client)

	result := n.must(t, "ADD", rtWeb)
	checkShape(t, "chain", version, result)
	n.must(t, "ADD", rtClient)
	chainTraffic(t, web, client, addresses(t, result))
	if version >= "0.4.0" {
		n.must(t, "CHECK", rtWeb)
		n.must(t, "CHECK", rtClient)
	} else if _, err := n.do("CHECK", rtWeb, nil); err == nil {
		t.Errorf("CHECK succeeded in version %s", version)
	}
	if version >= "1.1.0" {
		chainCollect(t, n, rtWeb, rtClient)
	}
	n.must(t, "DEL", rtClient)
	n.must(t, "DEL", rtWeb)
	before.clean(t, "ADD and DEL of two pods")
}

// addresses lists those of a result, without the length of the prefix.
func addresses(t testing.TB, result object) []string {
	t.Helper()
	var list []string
	ips, _ := result["ips"].([]any)
	for _, ip := range ips {
		prefix, err := netip.ParsePrefix(fmt.Sprint(ip.(map[string]any)["address"]))
		if err != nil {
			t.Fatalf("result: %v", err)
		}
		list = append(list, prefix.Addr().String())
	}
	return list
}

// chainTraffic connects pod to pod, and through the hostPort from everywhere.
func chainTraffic(t *testing.T, web, client *sandbox.Pod, addresses []string) {
	t.Helper()
	server, err := serve(web, 80)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	for _, address := range addresses {
		reach(t, client, net.JoinHostPort(address, "80"), web)
		reach(t, nil, net.JoinHostPort(address, "80"), web)
	}
	if !present(binDir(), "portmap") {
		return
	}
	for _, from := range []*sandbox.Pod{nil, client, web} {
		reach(t, from, "10.71.0.1:8080", web)
		reach(t, from, "[fd71::1]:8080", web)
	}
	reach(t, nil, "127.0.0.1:8080", web)
}

// chainCollect lets GC keep both pods, then one, and then brings the other back.
func chainCollect(t *testing.T, n *network, rtWeb, rtClient *libcni.RuntimeConf) {
	t.Helper()
	n.must(t, "STATUS", nil)
	web := types.GCAttachment{ContainerID: rtWeb.ContainerID, IfName: rtWeb.IfName}
	client := types.GCAttachment{ContainerID: rtClient.ContainerID, IfName: rtClient.IfName}
	both := watch(t)
	n.must(t, "GC", nil, web, client)
	both.clean(t, "GC with every pod valid")

	bare, err := openNetwork(n.list.Bytes, t.TempDir(), nil) // a cache that knows no pod, so that libcni sends no DEL
	if err != nil {
		t.Fatal(err)
	}
	if err := kerneltest.Age(stateDirs()...); err != nil {
		t.Fatal(err)
	}
	bare.must(t, "GC", nil, web)
	if leaks, err := both.diff(); err != nil || len(leaks) == 0 {
		t.Errorf("GC did not collect the pod %s: %v", client.ContainerID, err)
	}
	n.must(t, "CHECK", rtWeb)
	n.must(t, "DEL", rtClient)
	n.must(t, "ADD", rtClient)
	n.must(t, "CHECK", rtClient)
}

// TestChainParallel attaches many pods at once, each together with loopback as
// go-cni does, and takes them away at once.
func TestChainParallel(t *testing.T) {
	need(t, "loopback")
	n, err := openNetwork(chainOf(t, "1.0.0", "nftables"), t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	lo, err := openNetwork([]byte(`{"cniVersion":"1.0.0","name":"lo","plugins":[{"type":"loopback"}]}`), t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	warm := newPod(t, "parallel-warm")
	n.must(t, "ADD", attachment(warm, "warm", capabilities()))
	n.must(t, "DEL", attachment(warm, "warm", capabilities()))
	var pods []*sandbox.Pod
	for i := range 12 {
		pods = append(pods, newPod(t, fmt.Sprintf("parallel-%d", i)))
	}
	before := watch(t)
	for range 2 {
		attachAll(t, n, lo, pods)
		before.clean(t, "parallel ADD and DEL")
	}
}

// attachAll runs ADD of all pods at once, then DEL of all pods at once.
func attachAll(t *testing.T, n, lo *network, pods []*sandbox.Pod) {
	t.Helper()
	results := make([]object, len(pods))
	each := func(f func(i int, rt, rtLo *libcni.RuntimeConf) error) {
		var wait sync.WaitGroup
		for i, pod := range pods {
			caps := capabilities()
			caps["portMappings"] = []any{object{"hostPort": 9000 + i, "containerPort": 80, "protocol": "tcp"}}
			rt, rtLo := attachment(pod, pod.Name, caps), attachment(pod, pod.Name, nil)
			rtLo.IfName = "lo"
			wait.Go(func() {
				if err := f(i, rt, rtLo); err != nil {
					t.Errorf("%s: %v", pod.Name, err)
				}
			})
		}
		wait.Wait()
	}
	each(func(i int, rt, rtLo *libcni.RuntimeConf) error {
		loDone := make(chan error)
		go func() { _, err := lo.do("ADD", rtLo, nil); loDone <- err }()
		result, err := n.do("ADD", rt, nil)
		if err == nil {
			results[i] = rawObject(t, string(encode(result)))
		}
		return errors.Join(err, <-loDone)
	})
	distinct(t, results)
	each(func(_ int, rt, rtLo *libcni.RuntimeConf) error {
		_, err := n.do("DEL", rt, nil)
		_, errLo := lo.do("DEL", rtLo, nil)
		return errors.Join(err, errLo)
	})
}

// distinct fails the test if two results hold the same address.
func distinct(t *testing.T, results []object) {
	t.Helper()
	var seen []string
	for _, r := range results {
		for _, address := range addresses(t, r) {
			if slices.Contains(seen, address) {
				t.Errorf("address %s was given twice", address)
			}
			seen = append(seen, address)
		}
	}
	if len(seen) != 2*len(results) {
		t.Errorf("%d addresses for %d pods, want two each", len(seen), len(results))
	}
}

// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// Named is Attachment with the pod's name as container ID and as K8S_POD_NAME.
func Named(pod *sandbox.Pod, caps map[string]any) *libcni.RuntimeConf {
	rt := Attachment(pod, pod.Name, caps)
	for i, arg := range rt.Args {
		if arg[0] == "K8S_POD_NAME" {
			rt.Args[i][1] = pod.Name
		}
	}
	return rt
}

// HostPort returns the port mappings of a pod whose port 80 is mapped to port 8080 of the node.
func HostPort() map[string]any {
	return Mappings(Port(8080, 80, "tcp"))
}

// ChainOf returns a conflist with bridge, host-local and masquerade, and with portmap and bandwidth if the tested folder has them.
func ChainOf(t testing.TB, version, backend string) []byte {
	t.Helper()
	Need(t, "bridge", "host-local")
	plugins := []any{Object{
		"type": "bridge", "bridge": "chain0", "isGateway": true, "isDefaultGateway": true, "hairpinMode": true,
		"ipMasq": true, "ipMasqBackend": backend,
		"ipam": Object{"type": "host-local", "ranges": []any{
			[]any{Object{"subnet": "10.71.0.0/24"}}, []any{Object{"subnet": "fd71::/64"}},
		}},
	}}
	if hasChained(t, "portmap") {
		plugins = append(plugins, Object{"type": "portmap", "backend": backend, "snat": true, "capabilities": Object{"portMappings": true}})
	}
	if hasChained(t, "bandwidth") {
		plugins = append(plugins, Object{"type": "bandwidth", "capabilities": Object{"bandwidth": true}})
	}
	return Encode(Object{"cniVersion": version, "name": "chain", "plugins": plugins})
}

func hasChained(t testing.TB, plugin string) bool {
	t.Helper()
	if Present(BinDir(), plugin) {
		return true
	}
	t.Logf("SKIPPED part of the chain: no %s in %s", plugin, BinDir())
	return false
}

// Capabilities returns what containerd sends for a pod with one hostPort and two limits.
func Capabilities() map[string]any {
	return map[string]any{
		"portMappings": []any{Object{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}},
		"bandwidth": Object{
			"ingressRate": 1_000_000_000, "ingressBurst": 1<<32 - 1, "egressRate": 1_000_000_000, "egressBurst": 1<<32 - 1,
		},
	}
}

// Attachment returns the arguments that a runtime passes to libcni for a pod.
func Attachment(pod *sandbox.Pod, id string, caps map[string]any) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{
		ContainerID: id, NetNS: pod.Path, IfName: "eth0", CapabilityArgs: caps,
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_NAME", "web-0"}},
	}
}

// Addresses returns the addresses of a result without prefix lengths.
func Addresses(t testing.TB, result Object) []string {
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

// ChainTraffic tests connections between the pods, and to the hostPort from another pod, the node and the pod itself.
func ChainTraffic(t *testing.T, web, client *sandbox.Pod, addresses []string) {
	t.Helper()
	server, err := Serve(web, 80)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	for _, address := range addresses {
		Reach(t, client, net.JoinHostPort(address, "80"), web)
		Reach(t, nil, net.JoinHostPort(address, "80"), web)
	}
	if !Present(BinDir(), "portmap") {
		return
	}
	for _, from := range []*sandbox.Pod{nil, client, web} {
		Reach(t, from, "10.71.0.1:8080", web)
		Reach(t, from, "[fd71::1]:8080", web)
	}
	Reach(t, nil, "127.0.0.1:8080", web)
}

// Mappings returns the capability portMappings with the given mappings.
func Mappings(list ...any) map[string]any { return map[string]any{"portMappings": list} }

// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"net"
	"os/exec"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// The addresses of the node (NodeV4 and NodeV6) and of a second machine in its network (LANV4 and LANV6), which is its router and has no
// route to pods.
const (
	NodeV4 = "192.0.2.1"
	NodeV6 = "2001:db8:92::1"
	LANV4  = "192.0.2.2"
	LANV6  = "2001:db8:92::2"
)

// NewLAN creates the second machine, which lan0 connects to the node.
func NewLAN(t *testing.T) *sandbox.Pod {
	t.Helper()
	Program(t, "ip")
	lan := NewPod(t, Plain(t)+"-lan")
	Shell(t, fmt.Sprintf(`
		ip link add lan0 type veth peer name eth0 netns %[1]s
		ip addr add %[2]s/24 dev lan0; ip -6 addr add %[3]s/64 dev lan0 nodad
		ip -n %[1]s addr add %[4]s/24 dev eth0; ip -n %[1]s -6 addr add %[5]s/64 dev eth0 nodad
		ip link set lan0 up; ip -n %[1]s link set lo up; ip -n %[1]s link set eth0 up
		ip route add default via %[4]s; ip -6 route add default via %[5]s`, lan.Name, NodeV4, NodeV6, LANV4, LANV6))
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", "lan0").Run() })
	return lan
}

// IPv4Of returns the IPv4 address of a pod's eth0.
func IPv4Of(t *testing.T, pod *sandbox.Pod) string { t.Helper(); return AddressOf(t, pod, "-4") }

// AddressOf returns the address of a pod's eth0 in a family, "-4" or "-6".
func AddressOf(t *testing.T, pod *sandbox.Pod, family string) string {
	t.Helper()
	for _, word := range strings.Fields(Shell(t, "ip -n "+pod.Name+" "+family+" -o addr show dev eth0 scope global")) {
		if host, _, ok := strings.Cut(word, "/"); ok && net.ParseIP(host) != nil {
			return host
		}
	}
	t.Fatalf("%s has no address", pod.Name)
	return ""
}

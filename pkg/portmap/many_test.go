// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"github.com/podlace/podlace/pkg/kernel"
)

// TestManyPorts: what CHECK takes for a pod with iptables grows with its ports, and not with their square.
func TestManyPorts(t *testing.T) {
	const chain = "CNI-DN-X"
	jump := func(from string) []string { return []string{"-A " + from + " -j " + dnatChain + " "} }
	nat := kernel.NAT{"PREROUTING": jump("PREROUTING"), "OUTPUT": jump("OUTPUT")}
	var ports []kernel.HostPort
	for i := range uint16(2000) {
		p := kernel.HostPort{Protocol: "tcp", Port: 20000 + i, To: netip.AddrPortFrom(netip.MustParseAddr("10.1.0.5"), 80)}
		ports = append(ports, p)
		nat[dnatChain] = append(nat[dnatChain], fmt.Sprintf("-A %s -p tcp -m multiport --dports %d -j %s ", dnatChain, p.Port, chain))
		nat[chain] = append(nat[chain], fmt.Sprintf("-A %s -p tcp -m tcp --dport %d -j DNAT --to-destination %s ", chain, p.Port, p.To))
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if err := checkRules(nat, chain, ports); err != nil {
		t.Error(err)
	}
	runtime.ReadMemStats(&after)
	if mb := (after.TotalAlloc - before.TotalAlloc) >> 20; mb > 20 {
		t.Errorf("CHECK takes %d MB", mb)
	}
	nat[chain] = nat[chain][1:]
	if checkRules(nat, chain, ports) == nil {
		t.Error("a missing rule is not seen")
	}
}

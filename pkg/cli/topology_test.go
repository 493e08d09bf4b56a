// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/ports"
)

// exampleTopology returns a node with two invented bridges, two PFs, and pods with different properties.
func exampleTopology() topology {
	address := func(text string) pci.Address {
		a, err := pci.ParseAddress(text)
		if err != nil {
			panic(err)
		}
		return a
	}
	pf0, pf1 := address("0000:11:00.0"), address("0000:15:00.0")
	vf := func(a string, pf pci.Address, index int) pci.Device {
		return pci.Device{Address: address(a), PF: pf, VFIndex: index, NUMANode: pci.Unknown, Driver: "iavf"}
	}
	devices := []sriovDevice{
		{Device: pci.Device{Address: pf1, NUMANode: pci.Unknown, Driver: "ice", TotalVFs: 8}, PFName: "ens1f0"},
		{Device: pci.Device{Address: pf0, NUMANode: 1, Driver: "ice", TotalVFs: 8}, PFName: "ens0f0"},
		{Device: vf("0000:11:02.0", pf0, 0), Resource: "example.com/fast"},
		{Device: vf("0000:11:02.1", pf0, 1), Resource: "example.com/fast", Holder: &poddevices.Device{Namespace: "shop", Pod: "dpdk"}},
		{Device: vf("0000:15:02.0", pf1, 0), Fault: "the link of ens1f0 is down"},
	}
	list := []topologyPod{
		{Network: "podlace", Pod: "shop/web-0", ContainerID: "c1", IfName: "eth0", State: reconcile.Alive, Bridge: "br-none1",
			HostInterface: "veth1", Addresses: []netip.Addr{netip.MustParseAddr("10.58.0.3")}, IngressRate: 20e6,
			HostPorts: []ports.Port{{Port: 80, Protocol: "tcp"}}, VFs: []string{"0000:11:02.0"}},
		{Network: "podlace", ContainerID: "0123456789abcdef", IfName: "eth0", State: reconcile.Gone, Bridge: "br-none1", HostInterface: "veth2"},
		{Network: "blue", Pod: "shop/<b>&\"x\x1b[2J", ContainerID: "c3", IfName: "eth0", State: reconcile.Alive, Bridge: "br-none0",
			HostInterface: "veth3"},
		{Network: "plain", Pod: "shop/ptp", ContainerID: "c4", IfName: "eth0", State: reconcile.Unknown},
	}
	return newPicture("edge-3", list, devices, func(h poddevices.Device) string { return h.Namespace + "/" + h.Pod })
}

// TestTopologyText compares the printed tree with its order and columns. A pod's name cannot control the terminal.
func TestTopologyText(t *testing.T) {
	want := strings.ReplaceAll(`node edge-3
|- bridge br-none0: missing
|  '- veth3  shop/<b>&"x?[2J  eth0  network blue
|- bridge br-none1: missing
|  |- veth1  shop/web-0               eth0  10.58.0.3  network podlace  hostPorts 80/tcp  ingress 20Mbit/s  VFs 0000:11:02.0
|  '- veth2  container 0123456789abc  eth0             network podlace                                                        namespace gone
|- NUMA node 1
|  '- PF ens0f0 0000:11:00.0: ice, 2 of 8 VFs
|     |- VF 0 0000:11:02.0  shop/web-0  driver iavf  resource example.com/fast  network podlace
|     '- VF 1 0000:11:02.1  shop/dpdk   driver iavf  resource example.com/fast
|- NUMA node unknown
|  '- PF ens1f0 0000:15:00.0: ice, 1 of 8 VFs
|     '- VF 0 0000:15:02.0  -  driver iavf  the link of ens1f0 is down
'- without a bridge
   '- -  shop/ptp  eth0  network plain
`, "'", "`")
	if diff := cmp.Diff(want, exampleTopology().text()); diff != "" {
		t.Error(diff)
	}
	if got := newPicture("n", nil, nil, nil).text(); got != "node n\n`- no pod is recorded, and no card has VFs\n" {
		t.Errorf("empty node: %q", got)
	}
}

func TestTopologyCommand(t *testing.T) {
	if status, _, stderr := run("topology", "-o", "svg"); status != exitFailed || !strings.Contains(stderr, "want text or json") {
		t.Errorf("status %d, %q", status, stderr)
	}
	if _, help, _ := run("topology", "--help"); !strings.Contains(help, `name of this node in the configuration (default "the host name")`) {
		t.Errorf("the help depends on the machine:\n%s", help)
	}
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: the rest is root's")
	}
	flags := append([]string{"topology", "--node-name", "edge-3", "--conf-dir", t.TempDir()}, labFlags(t)...)
	status, stdout, stderr := run(flags...)
	for _, line := range []string{"node edge-3\n", "|- NUMA node 0\n", "`- PF ens1f0 0000:15:00.0: ice, 2 of 2 VFs\n",
		"|- VF 0 0000:11:02.0  shop/web-0  driver iavf  resource example.com/fast\n", "the link of ens0f0 is down\n"} {
		if status != exitOK || stderr != "" || !strings.Contains(stdout, line) {
			t.Errorf("status %d, %q lacks %q\n%s", status, stdout, line, stderr)
		}
	}
	_, stdout, _ = run(append(flags, "-o", "json")...)
	var got topology
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || len(got.Cards) != 2 || got.Cards[1].VFs[1].VFIndex != 1 ||
		got.Cards[1].NUMANode != 1 {
		t.Errorf("%v\n%s", err, stdout)
	}
	_, _, stderr = run(append(flags, "--socket", "/nonexistent")...)
	if !strings.Contains(stderr, "the device plugin did not say which pods have devices") {
		t.Errorf("stderr %q", stderr)
	}
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
)

const topologyHelp = `Show a picture of this node's pod network: bridges, the interface of each pod on
the node, pods with addresses, hostPorts and limits, and the VFs below their PF and
NUMA node. The data is that of 'podlace ls -o wide' and 'podlace sriov ls'.`

const topologyExample = `  podlace topology
  podlace topology --network podlace
  podlace topology -o json`

// topology is the pod network of one node.
type topology struct {
	Node    string           `json:"node"`
	Bridges []topologyBridge `json:"bridges"`
	Cards   []topologyCard   `json:"cards"`  // PFs
	Others  []topologyPod    `json:"others"` // pods that are not on a bridge and have no VF of this node
}

// topologyBridge is a bridge with its pods.
type topologyBridge struct {
	Name      string        `json:"name"`
	Addresses []string      `json:"addresses,omitempty"`
	MTU       int           `json:"mtu,omitempty"`
	State     string        `json:"state"` // up, down or missing
	Pods      []topologyPod `json:"pods"`
}

type topologyPod = *reconcile.Attachment

// topologyCard is a physical function (PF) and its VFs.
type topologyCard struct {
	sriovDevice
	VFs []topologyVF `json:"vfs"`
}

// topologyVF is a VF with the pod that uses it.
type topologyVF struct {
	sriovDevice
	Pod     string `json:"pod,omitempty"`
	Network string `json:"network,omitempty"` // of the attachment, if a CNI plugin attached the VF
}

type topologyFlags struct {
	confFlags
	sriov sriovFlags
}

func newTopology() *cobra.Command {
	var f topologyFlags
	cmd := &cobra.Command{
		Use:     "topology",
		Short:   "Show a picture of bridges, pods, ports, limits and VFs",
		Long:    topologyHelp,
		Example: topologyExample,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.draw(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f.add(cmd, "text", outputJSON)
	f.sriov.addNode(cmd)
	return cmd
}

func (f topologyFlags) draw(ctx context.Context, stdout, stderr io.Writer) error {
	list, damaged, err := f.read(stderr)
	if err != nil {
		return err
	}
	node, err := f.sriov.readNode(ctx)
	if err != nil {
		return err
	}
	node.printGaps(stderr, slices.ContainsFunc(node.snapshot.Devices, pci.Device.IsVF))
	for _, a := range list {
		if link, err := net.InterfaceByName(a.HostInterface); a.HostInterface != "" && a.State == reconcile.Alive &&
			(err != nil || link.Flags&net.FlagRunning == 0) {
			a.Fault = interfaceFault(link)
		}
	}
	t := newPicture(f.sriov.Host, list, node.devices(), node.holder)
	err = printAs(f.output, stdout, t, func() { fmt.Fprint(stdout, t.text()) })
	return errors.Join(printDamaged(stderr, damaged), err)
}

// interfaceFault returns why an interface on the node, nil if it is missing, passes no packets.
func interfaceFault(link *net.Interface) string {
	switch {
	case link == nil:
		return "interface missing"
	case link.Flags&net.FlagUp == 0:
		return "interface down"
	}
	return "no carrier: the pod's end is down"
}

// newPicture groups the attachments by bridge and the VFs by PF.
func newPicture(name string, list []topologyPod, devices []sriovDevice, holder func(h poddevices.Device) string) topology {
	t := topology{Node: cmp.Or(name, "this node"), Bridges: []topologyBridge{}, Cards: cardsOf(devices, list, holder), Others: []topologyPod{}}
	known := map[string]bool{}
	for _, card := range t.Cards {
		for _, vf := range card.VFs {
			known[vf.Address.String()] = true
		}
	}
	for _, a := range list {
		switch {
		case a.Bridge != "":
			t.addToBridge(a)
		case !slices.ContainsFunc(a.VFs, func(vf string) bool { return known[vf] }):
			t.Others = append(t.Others, a)
		}
	}
	slices.SortFunc(t.Bridges, func(a, b topologyBridge) int { return cmp.Compare(a.Name, b.Name) })
	return t
}

func (t *topology) addToBridge(a topologyPod) {
	i := slices.IndexFunc(t.Bridges, func(b topologyBridge) bool { return b.Name == a.Bridge })
	if i < 0 {
		i = len(t.Bridges)
		t.Bridges = append(t.Bridges, bridgeOf(a.Bridge))
	}
	t.Bridges[i].Pods = append(t.Bridges[i].Pods, a)
}

// bridgeOf reads the state of a bridge from the kernel.
func bridgeOf(name string) topologyBridge {
	b := topologyBridge{Name: name, State: "missing", Pods: []topologyPod{}}
	link, err := net.InterfaceByName(name)
	if err != nil {
		return b
	}
	b.MTU, b.State = link.MTU, map[bool]string{true: "up", false: "down"}[link.Flags&net.FlagUp != 0]
	addresses, _ := link.Addrs() // the link may be gone now; the picture then lacks its addresses
	for _, a := range addresses {
		if p, ok := a.(*net.IPNet); ok && !p.IP.IsLinkLocalUnicast() {
			b.Addresses = append(b.Addresses, p.String())
		}
	}
	slices.Sort(b.Addresses)
	return b
}

// cardsOf returns the PFs that support VFs, with their VFs, sorted by NUMA node.
func cardsOf(devices []sriovDevice, list []topologyPod, holder func(h poddevices.Device) string) []topologyCard {
	cards := []topologyCard{}
	for _, d := range devices {
		if d.TotalVFs > 0 {
			cards = append(cards, topologyCard{d, []topologyVF{}})
		}
	}
	for _, d := range devices {
		i := slices.IndexFunc(cards, func(c topologyCard) bool { return c.Address == d.PF })
		if !d.IsVF() || i < 0 {
			continue
		}
		vf := topologyVF{sriovDevice: d}
		if d.Holder != nil {
			vf.Pod = holder(*d.Holder)
		}
		if k := slices.IndexFunc(list, func(a topologyPod) bool { return slices.Contains(a.VFs, vf.Address.String()) }); k >= 0 {
			vf.Pod, vf.Network = podName(list[k]), list[k].Network
		}
		cards[i].VFs = append(cards[i].VFs, vf)
	}
	slices.SortStableFunc(cards, func(a, b topologyCard) int { return cmp.Compare(uint(a.NUMANode), uint(b.NUMANode)) }) // unknown last
	return cards
}

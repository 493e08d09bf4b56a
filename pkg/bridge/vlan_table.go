// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"net"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
)

// vlanSchema is the version of the table, and vlanChain one of its base chains.
const (
	vlanSchema = 2
	vlanChain  = "postrouting"
)

// VLANGateway is the link that carries the gateway addresses of a VLAN.
type VLANGateway struct {
	Bridge, Link string
	MAC          net.HardwareAddr
}

func (g VLANGateway) elements() []nft.Element {
	return []nft.Element{{Set: "gateways", Key: nft.Key(nft.IfName(g.Bridge), g.MAC)},
		{Set: "hairpin", Key: nft.Key(nft.IfName(g.Link), nft.IfName(g.Link))}}
}

// buildVLANs writes the rules, which are static: the gateway of a VLAN is an element of the sets.
//
// With br_netfilter and bridge-nf-call-iptables, which Kubernetes asks for, IP rules see a packet twice when it passes the port of such a
// gateway: on the bridge, and where it is routed. What is translated, or not, is decided at the first time and for good, by rules that
// see the bridge as the interface, which has no address in that VLAN. So connection tracking is told to leave those frames alone: they
// carry the gateway's MAC. And a Service whose backend is in the client's VLAN needs the node as source, as the backend would answer
// past it.
func buildVLANs(r nft.Ruleset) error {
	gateways, err := r.Set("gateways", nil, nftables.TypeIFName, nftables.TypeEtherAddr)
	if err != nil {
		return err
	}
	hairpin, err := r.Set("hairpin", nil, nftables.TypeIFName, nftables.TypeIFName)
	if err != nil {
		return err
	}
	bridged := r.Chain("bridged", nftables.ChainHookPrerouting, guardPriority, nftables.ChainTypeFilter)
	for _, offset := range []uint32{0, 6} { // destination and source of the frame
		r.Rule(bridged, inputLink(), &expr.Payload{DestRegister: regValue, Base: expr.PayloadBaseLLHeader, Offset: offset, Len: 6},
			&expr.Lookup{SourceRegister: regLink, SetName: gateways.Name, SetID: gateways.ID}, &expr.Notrack{})
	}
	back := r.Chain(vlanChain, nftables.ChainHookPostrouting, int(*nftables.ChainPriorityNATSource), nftables.ChainTypeNAT)
	r.Rule(back, slices.Concat(nft.Translated(), []expr.Any{inputLink(), &expr.Meta{Key: expr.MetaKeyOIFNAME, Register: regValue},
		&expr.Lookup{SourceRegister: regLink, SetName: hairpin.Name, SetID: hairpin.ID}, &expr.Masq{}})...)
	return r.Mark(vlanSchema)
}

// EnsureVLANGateway lets rules that translate addresses work for what passes the gateway of a VLAN. A kernel without nftables cannot.
func EnsureVLANGateway(host *kernel.Node, g VLANGateway) error {
	t, err := host.NFT.Open(nft.VLANTable)
	if err != nil {
		return nft.IgnoreUnsupported(err)
	}
	missing, err := t.Missing(g.elements())
	if err != nil {
		return nft.IgnoreUnsupported(err)
	}
	rules, err := t.Marked(vlanSchema)
	if err != nil {
		return err
	}
	if !rules {
		err = installVLANs()
	}
	if _, noted := attachment.NodeNoted(vlanTable); !noted && err == nil {
		err = attachment.NoteNode(vlanTable, "")
	}
	if err == nil {
		err = t.Add(missing)
	}
	return fault.Ignore(err, unix.EEXIST) // many first pods come at once
}

// vlanTable notes that the node has the table.
const vlanTable = "vlan-gateways"

// hasVLANTable reports whether the kernel has the rules.
func hasVLANTable(host *kernel.Node) (bool, error) {
	t, err := host.NFT.Open(nft.VLANTable)
	if err != nil {
		return false, err
	}
	return t.Marked(vlanSchema)
}

// forgetFlushedVLANs removes the note of a table that is gone and that no gateway needs. An ADD makes the table before it notes it, so that
// the second look finds what came between the first one and the removal.
func forgetFlushedVLANs(host *kernel.Node) error {
	if _, noted := attachment.NodeNoted(vlanTable); !noted {
		return nil
	}
	if ok, err := hasVLANTable(host); ok || err != nil {
		return err
	}
	if err := attachment.UnnoteNode(vlanTable); err != nil {
		return err
	}
	if ok, err := hasVLANTable(host); !ok || err != nil {
		return err
	}
	return attachment.NoteNode(vlanTable, "")
}

func installVLANs() error {
	return nft.Install("nft add table inet "+nft.VLANTable, nft.VLANTable, buildVLANs)
}

// compareVLANGateway returns nil if the rules are there or cannot be, otherwise an error of plugin.CodeStateDiffers.
func compareVLANGateway(host *kernel.Node, g VLANGateway) error {
	t, err := host.NFT.Open(nft.VLANTable)
	if err != nil {
		return nft.IgnoreUnsupported(err)
	}
	missing, err := t.Missing(g.elements())
	drift := ""
	if err == nil {
		drift, err = t.DriftOf(vlanSchema, buildVLANs)
	}
	switch {
	case err != nil:
		return nft.IgnoreUnsupported(err)
	case len(missing) > 0:
		return differs("the gateway %s misses an entry in nftables table inet %s", g.Link, nft.VLANTable)
	case drift != "":
		return differs("nftables rules of table inet %s %s", nft.VLANTable, drift)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"net"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
)

func vlanSchema() nft.Schema { return nft.Schema{Table: nft.VLANTable, Version: 2, Build: buildVLANs} }

const vlanChain = "postrouting"

// VLANGateway is the link with the gateway addresses of a VLAN.
type VLANGateway struct {
	Bridge, Link string
	MAC          net.HardwareAddr
}

func (g VLANGateway) elements() []nft.Element {
	return []nft.Element{{Set: "gateways", Key: nft.Key(nft.IfName(g.Bridge), g.MAC)},
		{Set: "hairpin", Key: nft.Key(nft.IfName(g.Link), nft.IfName(g.Link))}}
}

// buildVLANs writes the rules of VLAN gateways, which are the same for any number of VLANs. The gateways are elements of its sets.
//
// Kubernetes needs br_netfilter with bridge-nf-call-iptables, with which iptables rules see a packet through a gateway's port twice: when
// it is bridged and when it is routed. The kernel would choose the NAT of the connection at the first time, when the input interface is the
// bridge, which has no address in the VLAN, so NAT would use a wrong one. Therefore bridged frames with the gateway's MAC are excluded from
// connection tracking. Connections to a Service's backend in the client's own VLAN are masqueraded, because the backend would answer the
// client directly, from an address that it does not expect.
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
	for _, offset := range []uint32{0, 6} { // destination and source MAC of the frame
		r.Rule(bridged, inputLink(), &expr.Payload{DestRegister: regValue, Base: expr.PayloadBaseLLHeader, Offset: offset, Len: 6},
			&expr.Lookup{SourceRegister: regLink, SetName: gateways.Name, SetID: gateways.ID}, &expr.Notrack{})
	}
	back := r.Chain(vlanChain, nftables.ChainHookPostrouting, int(*nftables.ChainPriorityNATSource), nftables.ChainTypeNAT)
	r.Rule(back, slices.Concat(nft.Translated(), []expr.Any{inputLink(), &expr.Meta{Key: expr.MetaKeyOIFNAME, Register: regValue},
		&expr.Lookup{SourceRegister: regLink, SetName: hairpin.Name, SetID: hairpin.ID}, &expr.Masq{}})...)
	return nil
}

// EnsureVLANGateway writes the rules that make NAT work for traffic through a VLAN's gateway. It is a no-op on a kernel without nftables.
func EnsureVLANGateway(host *kernel.Node, g VLANGateway) error {
	t, err := host.NFT.Open(nft.VLANTable)
	if err != nil {
		return nft.IgnoreUnsupported(err)
	}
	missing, err := t.Missing(g.elements())
	if err != nil {
		return nft.IgnoreUnsupported(err)
	}
	rules, err := vlanSchema().Intact(&host.NFT)
	if err != nil {
		return err
	}
	if rules {
		err = t.Add(missing)
	} else {
		err = vlanSchema().Install(missing)
	}
	if fault.Ignore(err, unix.EEXIST) == nil {
		err = noteTable(nft.VLANTable)
	}
	return fault.Ignore(err, unix.EEXIST) // many first pods may run concurrently
}

// compareVLANGateway returns an error with plugin.CodeStateDiffers if the kernel lacks the gateway's rules, and nil without nftables.
func compareVLANGateway(host *kernel.Node, g VLANGateway) error {
	t, err := host.NFT.Open(nft.VLANTable)
	if err != nil {
		return nft.IgnoreUnsupported(err)
	}
	missing, err := t.Missing(g.elements())
	drift := ""
	if err == nil {
		drift, err = vlanSchema().Drift(&host.NFT)
	}
	switch {
	case err != nil:
		return nft.IgnoreUnsupported(err)
	case len(missing) > 0:
		return plugin.Differs("the gateway %s misses an entry in nftables table inet %s", g.Link, nft.VLANTable)
	case drift != "":
		return plugin.Differs("%s", drift)
	}
	return nil
}

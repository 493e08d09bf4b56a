// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"net/netip"
	"slices"
	"strings"

	mdl "github.com/mdlayher/netlink"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/nft"
	"golang.org/x/sys/unix"
)

// What the reference plugins (github.com/containernetworking/plugins) leave in the node's tables for one attachment. H is SHA-512 of
// network and container ID, in hexadecimal digits:
//
//	bridge     chain CNI-H[:24] in nat of iptables and ip6tables, and jumps to it from POSTROUTING       all versions
//	bridge     rules of chain masq_checks in table inet cni_plugins_masquerade, whose comment begins
//	           with SHA-512(network)[:16]-SHA-512(interface:container)[:16]                              from 1.6.0
//	bridge     chains cni-br-iface-<container>-<interface> and the same with -mac in table bridge nat,
//	           and a jump from PREROUTING                                                                from 1.0.0
//	portmap    chain CNI-DN-H[:21] in nat, and jumps to it from CNI-HOSTPORT-DNAT                        all versions
//	portmap    chain CNI-SN-H[:21] in nat, and jumps to it from CNI-HOSTPORT-SNAT                        to 0.6
//	portmap    rules in tables ip and ip6 cni_hostport, in whatever chain, whose comment is the
//	           container ID. Chain hostip_hostports is of versions before 1.9.0                          from 1.6.0
//	bandwidth  link bwpH[:12]                                                                            all versions
const (
	referenceMasquerade = "cni_plugins_masquerade"
	referenceMasqChain  = "masq_checks"
	referenceHostports  = "cni_hostport"
	spoofParent         = "PREROUTING"
)

// Reference is an attachment as the reference plugins name it.
type Reference struct {
	Network, ContainerID, IfName string
	// Hashes begin the names of chains; the reference has one, and there may be one of Podlace's own for a further interface.
	Hashes []string
	// Addresses tell attachments of one container apart where the reference does not; without any, all of the container's are meant.
	Addresses []netip.Addr
}

func (r Reference) masqueradePrefix() string {
	return shortHash(r.Network) + "-" + shortHash(r.IfName+":"+r.ContainerID)
}

func (r Reference) isMasquerade(of nft.Rule) bool {
	return strings.HasPrefix(of.Comment, r.masqueradePrefix())
}

func shortHash(text string) string {
	sum := sha512.Sum512([]byte(text))
	return hex.EncodeToString(sum[:8])
}

// names appends a part of each hash to a prefix.
func (r Reference) names(prefix string, digits int) (names []string) {
	for _, h := range r.Hashes {
		names = append(names, prefix+h[:digits])
	}
	return names
}

func (r Reference) masqueradeChains() iptables.Chains {
	return iptables.Chains{"POSTROUTING": r.names("CNI-", 24)}
}

func (r Reference) portChains() iptables.Chains {
	return iptables.Chains{"CNI-HOSTPORT-DNAT": r.names("CNI-DN-", 21), "CNI-HOSTPORT-SNAT": r.names("CNI-SN-", 21)}
}

// DelReferenceMasquerade removes the rules of a bridge attachment that the reference made: masquerade in every form, and the protection
// against false MACs. Nothing there is no error and costs some questions; rules that are there are listed.
func (n *Node) DelReferenceMasquerade(ref Reference) error {
	err := nft.Remove("nft delete rules that the reference plugins left", func(t *nft.Handle) ([]mdl.Message, error) {
		out, err := ref.masqueradeChains().Unlink(t)
		if err != nil {
			return nil, err
		}
		for _, chain := range []string{ref.spoofChain(), ref.spoofChain() + "-mac"} {
			more, err := t.Unlink(nft.Place{Family: unix.NFPROTO_BRIDGE, Table: "nat", Chain: spoofParent}, chain)
			if err != nil {
				return nil, err
			}
			out = append(out, more...)
		}
		more, err := t.Deletions(nft.Place{Family: unix.NFPROTO_INET, Table: referenceMasquerade, Chain: referenceMasqChain},
			ref.isMasquerade)
		return append(out, more...), err
	})
	return errors.Join(err, ref.masqueradeChains().RemoveLegacy())
}

// DelReferencePorts removes the hostPort rules of an attachment that the reference made, in every form.
func (n *Node) DelReferencePorts(ref Reference) error {
	err := nft.Remove("nft delete hostPort rules that the reference plugins left", func(t *nft.Handle) ([]mdl.Message, error) {
		out, err := ref.portChains().Unlink(t)
		if err != nil {
			return nil, err
		}
		for _, family := range []byte{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
			more, err := t.Deletions(nft.Place{Family: family, Table: referenceHostports, Chain: ""}, ref.isPortRule)
			if err != nil {
				return nil, err
			}
			out = append(out, more...)
		}
		return out, nil
	})
	return errors.Join(err, ref.portChains().RemoveLegacy())
}

// isPortRule tells whether a rule is about the attachment. Its comment is the container ID alone, so the addresses decide between two
// networks of one container.
func (r Reference) isPortRule(of nft.Rule) bool {
	if of.Comment != r.ContainerID {
		return false
	}
	return len(r.Addresses) == 0 || slices.ContainsFunc(r.Addresses, func(a netip.Addr) bool { return of.Has(a.AsSlice()) })
}

func (r Reference) spoofChain() string { return "cni-br-iface-" + r.ContainerID + "-" + r.IfName }

// HasReferenceSpoofCheck tells whether the reference checks the MACs of the attachment.
func (n *Node) HasReferenceSpoofCheck(ref Reference) (bool, error) {
	list, err := nft.ListRules(nft.Place{Family: unix.NFPROTO_BRIDGE, Table: "nat", Chain: spoofParent})
	return slices.ContainsFunc(list, func(r nft.Rule) bool { return r.Jump == ref.spoofChain() }), err
}

// HasReferenceMasquerade tells whether the reference's rules masquerade an address of the attachment.
func (n *Node) HasReferenceMasquerade(ref Reference, address netip.Addr) (bool, error) {
	is := func(r nft.Rule) bool { return r.Has(address.AsSlice()) }
	list, err := nft.ListRules(nft.Place{Family: unix.NFPROTO_INET, Table: referenceMasquerade, Chain: referenceMasqChain})
	if err != nil {
		return false, err
	}
	if slices.ContainsFunc(list, func(r nft.Rule) bool { return ref.isMasquerade(r) && is(r) }) {
		return true, nil
	}
	if list, err = nft.ListRules(iptables.Place(address.Is4(), "POSTROUTING")); err != nil {
		return false, err
	}
	chains := ref.names("CNI-", 24)
	if slices.ContainsFunc(list, func(r nft.Rule) bool { return slices.Contains(chains, r.Jump) && is(r) }) {
		return true, nil
	}
	if !iptables.LegacyUsed(address.Is4()) {
		return false, nil
	}
	nat, err := iptables.ReadLegacy(address.Is4())
	return slices.ContainsFunc(chains, func(chain string) bool {
		return len(nat.Rules("POSTROUTING", "-s "+address.String()+"/", "-j "+chain+" ")) > 0
	}), err
}

// HasReferencePort tells whether the reference's rules of nftables forward the port to the pod.
func (n *Node) HasReferencePort(ref Reference, p HostPort) (bool, error) {
	at := nft.Place{Family: unix.NFPROTO_IPV4, Table: referenceHostports, Chain: ""}
	if !p.To.Addr().Is4() {
		at.Family = unix.NFPROTO_IPV6
	}
	list, err := nft.ListRules(at)
	return slices.ContainsFunc(list, func(r nft.Rule) bool {
		return r.Comment == ref.ContainerID && r.Has(p.protocol()) && r.Has(nft.BigEndian(p.Port)) && r.Has(nft.BigEndian(p.To.Port())) && r.Has(p.To.Addr().AsSlice()) &&
			(!p.HostIP.IsValid() || r.Has(p.HostIP.AsSlice()))
	}), err
}

// HasReferencePortChain tells whether the attachment may have chains for its ports in iptables.
func (n *Node) HasReferencePortChain(ref Reference) (bool, error) {
	if iptables.LegacyUsed(true) || iptables.LegacyUsed(false) {
		return true, nil
	}
	t, err := nft.Open("")
	if err != nil {
		return false, err
	}
	defer t.Close()
	list, err := iptables.Chains{"CNI-HOSTPORT-DNAT": ref.names("CNI-DN-", 21)}.Unlink(t)
	return len(list) > 0, err
}

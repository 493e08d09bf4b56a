// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/nft"
)

// Bridge handles the reference bridge plugin's rules for an attachment: all variants of masquerade, and the check of the MAC (macspoofchk).
type Bridge Attachment

const postrouting = "POSTROUTING"

// Chain returns the name of the attachment's chain in the iptables nat table, to which POSTROUTING jumps.
func (b Bridge) Chain() string { return b.chains()[postrouting][0] }

func (b Bridge) chains() iptables.Chains {
	return iptables.Chains{postrouting: hashNames(b.Hashes, "CNI-", 24)}
}

func (b Bridge) spoofChain() string { return "cni-br-iface-" + b.ContainerID + "-" + b.IfName }

// masqueradeRules and spoofJumps return the nftables chains that contain rules of the reference plugin.
func masqueradeRules() nft.Place {
	return nft.Place{Family: unix.NFPROTO_INET, Table: "cni_plugins_masquerade", Chain: "masq_checks"}
}

func spoofJumps() nft.Place {
	return nft.Place{Family: unix.NFPROTO_BRIDGE, Table: "nat", Chain: "PREROUTING"}
}

func (b Bridge) commentPrefix() string {
	return shortHash(b.Network) + "-" + shortHash(b.IfName+":"+b.ContainerID)
}

func (b Bridge) isMasquerade(of nft.Rule) bool {
	return strings.HasPrefix(of.Comment, b.commentPrefix())
}

// Remove removes the rules. Without rules it sends only a few requests; otherwise it first reads all of them.
func (b Bridge) Remove() error {
	err := nft.Remove("nft delete rules that the reference plugins left", nft.Removal{
		Chains: append(b.chains().Jumps(), nft.Jump{Parent: spoofJumps(), Chain: b.spoofChain()},
			nft.Jump{Parent: spoofJumps(), Chain: b.spoofChain() + "-mac"}),
		Rules: []nft.Match{{In: masqueradeRules(), Want: b.isMasquerade}},
	})
	return errors.Join(err, b.chains().RemoveLegacy())
}

// HasSpoofCheck reports whether the reference plugin's rules check the source MAC of the attachment.
func (b Bridge) HasSpoofCheck() (bool, error) {
	list, err := nft.ListRules(spoofJumps())
	return slices.ContainsFunc(list, func(r nft.Rule) bool { return r.Jump == b.spoofChain() }), err
}

// HasMasquerade reports whether the reference plugin's rules masquerade an address of the attachment.
func (b Bridge) HasMasquerade(address netip.Addr) (bool, error) {
	is := func(r nft.Rule) bool { return r.Has(address.AsSlice()) }
	list, err := nft.ListRules(masqueradeRules())
	if err != nil {
		return false, err
	}
	if slices.ContainsFunc(list, func(r nft.Rule) bool { return b.isMasquerade(r) && is(r) }) {
		return true, nil
	}
	if list, err = nft.ListRules(iptables.Place(address.Is4(), postrouting)); err != nil {
		return false, err
	}
	chains := b.chains()[postrouting]
	if slices.ContainsFunc(list, func(r nft.Rule) bool { return slices.Contains(chains, r.Jump) && is(r) }) {
		return true, nil
	}
	if !iptables.LegacyUsed(address.Is4()) {
		return false, nil
	}
	nat, err := iptables.ListLegacy(address.Is4(), postrouting)
	return slices.ContainsFunc(chains, func(chain string) bool {
		return len(nat.Rules(postrouting, "-s "+address.String()+"/", "-j "+chain+" ")) > 0
	}), err
}

// WriteMasquerade writes the nftables rules with which the reference plugin masquerades addresses, which need the prefix length of their
// subnet. Packets to a destination in except keep their source address. Existing rules stay, because a connection that starts while they
// are being rewritten would never get a reply.
func (b Bridge) WriteMasquerade(addresses, except []netip.Prefix) error {
	has, err := nft.ListRules(masqueradeRules())
	if err != nil || !slices.ContainsFunc(addresses, func(a netip.Prefix) bool {
		return !slices.ContainsFunc(has, func(r nft.Rule) bool { return b.isMasquerade(r) && r.Has(a.Addr().AsSlice()) })
	}) {
		return err
	}
	return nft.Build("nft add masquerade rules for the reference plugins", func(c *nftables.Conn) error {
		h := nft.NewRuleset(c, &nftables.Table{Name: masqueradeRules().Table, Family: nftables.TableFamilyINet})
		checks := c.AddChain(&nftables.Chain{Table: h.Table, Name: masqueradeRules().Chain})
		// The reference plugin sets no policy for this chain, so it gets the kernel's default, which is accept as well.
		base := h.Chain("postrouting", nftables.ChainHookPostrouting, int(*nftables.ChainPriorityNATSource), nftables.ChainTypeNAT)
		for _, multicast := range []netip.Prefix{netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("ff00::/8")} {
			f := familyOf(multicast.Addr().Is4())
			h.Rule(base, slices.Concat(f.Only(), f.inSubnet(f.Destination, multicast, expr.CmpOpEq),
				[]expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}})...)
		}
		h.Rule(base, &expr.Verdict{Kind: expr.VerdictGoto, Chain: checks.Name})
		comment := fmt.Sprintf("%s, net: %s, if: %s, id: %s", b.commentPrefix(), b.Network, b.IfName, b.ContainerID)
		comment = comment[:min(len(comment), nft.MaxComment)]
		for _, a := range addresses {
			f := familyOf(a.Addr().Is4())
			from := slices.Concat(f.Only(), f.isAddress(f.Source, a.Addr()))
			for _, p := range except {
				if p.Addr().Is4() == a.Addr().Is4() {
					h.Commented(checks, comment, slices.Concat(from, f.inSubnet(f.Destination, p, expr.CmpOpEq),
						[]expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}))
				}
			}
			h.Commented(checks, comment, slices.Concat(from, f.inSubnet(f.Destination, a.Masked(), expr.CmpOpNeq), []expr.Any{&expr.Masq{}}))
		}
		return nil
	})
}

// WriteSpoofCheck writes the chains of the reference plugin's macspoofchk, which drop frames from a bridge port without the given source
// MAC. It is a no-op if they exist.
func (b Bridge) WriteSpoofCheck(link string, mac net.HardwareAddr) error {
	if ok, err := b.HasSpoofCheck(); ok || err != nil {
		return err
	}
	return nft.Build("nft add check of MACs for the reference plugins", func(c *nftables.Conn) error {
		r := nft.NewRuleset(c, &nftables.Table{Name: spoofJumps().Table, Family: nftables.TableFamilyBridge})
		policy := nftables.ChainPolicyAccept
		base := c.AddChain(&nftables.Chain{Table: r.Table, Name: spoofJumps().Chain, Type: nftables.ChainTypeFilter,
			Hooknum:  nftables.ChainHookPrerouting,
			Priority: nftables.ChainPriorityRef(-300), Policy: &policy})
		comment := "macspoofchk-" + b.ContainerID + "-" + b.IfName
		port, macs := r.Chain(b.spoofChain(), nil, 0, ""), r.Chain(b.spoofChain()+"-mac", nil, 0, "")
		r.Commented(macs, comment, []expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseLLHeader, Offset: 6, Len: 6}, nft.Equal(mac),
			&expr.Verdict{Kind: expr.VerdictReturn}})
		r.Commented(macs, comment, nft.Drop())
		r.Commented(port, comment, []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: macs.Name}})
		r.Commented(base, comment, []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, nft.Equal(nft.IfName(link)),
			&expr.Verdict{Kind: expr.VerdictJump, Chain: port.Name}})
		return nil
	})
}

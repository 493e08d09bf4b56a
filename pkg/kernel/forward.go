// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"github.com/podlace/podlace/pkg/nft"
	"golang.org/x/sys/unix"
)

// policyDrop is NF_DROP, which drops what no rule of a chain decides on.
const policyDrop = 0

// Chain is the name of a chain in nf_tables, where iptables keeps its rules too (iptables-nft). Those of iptables-legacy are not seen.
type Chain struct{ Family, Table, Name string }

// String is the name as nft list chain takes it.
func (c Chain) String() string { return c.Family + " " + c.Table + " " + c.Name }

// IPTables tells the chains that iptables and ip6tables show.
func (c Chain) IPTables() bool { return c.Family != "inet" }

// Covers tells whether packets of a family pass the chain.
func (c Chain) Covers(is4 bool) bool { return c.Family == "inet" || is4 == (c.Family == "ip") }

// FilterChain is a chain of the filter table of iptables or ip6tables.
func FilterChain(is4 bool, name string) Chain {
	if is4 {
		return Chain{"ip", "filter", name}
	}
	return Chain{"ip6", "filter", name}
}

// ForwardDrops returns the chains that drop what the node forwards and no rule of theirs accepts: FORWARD of iptables and ip6tables, whose
// policy Docker and ufw set, and forward of the table inet filter, as the nftables.conf of distributions has it. One request for each,
// however many rules there are.
func (n *Node) ForwardDrops() (drops []Chain, err error) {
	for _, c := range []Chain{FilterChain(true, "FORWARD"), FilterChain(false, "FORWARD"), {"inet", "filter", "forward"}} {
		state, _, err := n.chain(c)
		if err != nil {
			return nil, err
		}
		if state.Base && state.Policy == policyDrop {
			drops = append(drops, c)
		}
	}
	return drops, nil
}

// HasChain reports whether a chain exists.
func (n *Node) HasChain(c Chain) (bool, error) {
	_, has, err := n.chain(c)
	return has, err
}

func (n *Node) chain(c Chain) (state nft.Chain, ok bool, err error) {
	t, err := n.NFT.Open("")
	if err != nil {
		return state, false, err
	}
	family := map[string]byte{"ip": unix.NFPROTO_IPV4, "ip6": unix.NFPROTO_IPV6, "inet": unix.NFPROTO_INET}[c.Family]
	return t.Chain(nft.Place{Family: family, Table: c.Table, Chain: c.Name})
}

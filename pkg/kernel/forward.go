// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"

	mdl "github.com/mdlayher/netlink"
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
	err = n.chains([]Chain{FilterChain(true, "FORWARD"), FilterChain(false, "FORWARD"), {"inet", "filter", "forward"}}, func(c Chain, state chainState) {
		if state.base && state.policy == policyDrop {
			drops = append(drops, c)
		}
	})
	return drops, err
}

// HasChain tells whether there is such a chain.
func (n *Node) HasChain(c Chain) (has bool, err error) {
	err = n.chains([]Chain{c}, func(Chain, chainState) { has = true })
	return has, err
}

// chains calls f for those of the chains that are there.
func (n *Node) chains(list []Chain, f func(Chain, chainState)) error {
	t, err := n.openNFT("")
	if err != nil {
		return err
	}
	for _, c := range list {
		state, ok, err := t.getChain(c)
		if err != nil {
			return err
		}
		if ok {
			f(c, state)
		}
	}
	return nil
}

// chainState is what the kernel tells of a chain. Only base chains, which hooks lead to, have a policy.
type chainState struct {
	base   bool
	policy uint32
}

func (t *nft) getChain(c Chain) (state chainState, ok bool, err error) {
	enc := mdl.NewAttributeEncoder()
	enc.String(unix.NFTA_CHAIN_TABLE, c.Table)
	enc.String(unix.NFTA_CHAIN_NAME, c.Name)
	data, err := enc.Encode()
	if err != nil {
		return chainState{}, false, fmt.Errorf("encode the name of chain %s: %w", c, err)
	}
	family := map[string]byte{"ip": unix.NFPROTO_IPV4, "ip6": unix.NFPROTO_IPV6, "inet": unix.NFPROTO_INET}[c.Family]
	replies, err := t.conn.ask(mdl.Message{
		Header: mdl.Header{Type: mdl.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETCHAIN), Flags: mdl.Request},
		Data:   append([]byte{family, 0, 0, 0}, data...),
	})
	if errors.Is(err, unix.ENOENT) || NoNFT(err) {
		return chainState{}, false, nil
	}
	if err != nil {
		return chainState{}, false, fmt.Errorf("nft list chain %s: %w", c, err)
	}
	if len(replies) == 0 {
		return chainState{}, false, nil
	}
	return parseChain(replies[0].Data), true, nil
}

// parseChain reads a NFT_MSG_NEWCHAIN message.
func parseChain(data []byte) (state chainState) {
	if len(data) < 4 {
		return chainState{}
	}
	walk(data[4:], func(kind uint16, value []byte) {
		if kind == unix.NFTA_CHAIN_POLICY && len(value) == 4 {
			state.base, state.policy = true, binary.BigEndian.Uint32(value)
		}
	})
	return state
}

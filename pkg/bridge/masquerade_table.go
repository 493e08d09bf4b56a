// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
)

// MasqueradeSets are the sets of a network: traffic from Sources to anything but Local and multicast gets the node's
// address.
type MasqueradeSets struct {
	Network        string
	Sources, Local []netip.Prefix
}

// multicast is never masqueraded: a receiver has no way to answer (RFC 1112, RFC 4291).
var multicast = [...]string{"224.0.0.0/4", "ff00::/8"}

func (m MasqueradeSets) name() string {
	sum := sha512.Sum512([]byte(m.Network))
	return hex.EncodeToString(sum[:8])
}

func setName(kind, name string, is4 bool) string {
	if is4 {
		return kind + "4-" + name
	}
	return kind + "6-" + name
}

// empty reports whether there is nothing in it.
func (m MasqueradeSets) empty() bool { return len(m.Sources)+len(m.Local) == 0 }

// addMasquerade adds what missingMasquerade returned to a network that hasMasquerade. unix.EEXIST: a prefix overlaps with one that
// is there, and SetMasquerade must write all of them.
func addMasquerade(host *kernel.Node, m MasqueradeSets) error {
	t, err := host.NFT.Open(nft.MasqueradeTable)
	if err != nil {
		return err
	}
	var elements []nft.Element
	for _, s := range m.sets() {
		for _, p := range s.prefixes {
			elements = append(elements, interval(setName(s.kind, m.name(), p.Addr().Is4()), p)...)
		}
	}
	if err := t.Add(elements); err != nil {
		if errors.Is(err, unix.ENOTEMPTY) {
			return unix.EEXIST
		}
		return err
	}
	missing, err := missingMasquerade(host, m) // intervals that share an end overlap without an error
	if err == nil && !missing.empty() {
		err = unix.EEXIST
	}
	return err
}

// SetMasquerade makes m everything that the network masquerades.
func SetMasquerade(m MasqueradeSets) error {
	return nft.Build("nft set masquerade of network "+m.Network, m.build)
}

// hasMasquerade reports whether the network's chain, with its rules, and sets are there.
func hasMasquerade(host *kernel.Node, network string) (bool, error) {
	missing, err := missingMasquerade(host, MasqueradeSets{Network: network, Local: MasqueradeSets{}.multicast()})
	if err != nil || !missing.empty() {
		return false, err
	}
	return hasMasqueradeRules(network)
}

// hasMasqueradeRules reports whether the network's chain has its rules, one for each family.
func hasMasqueradeRules(network string) (bool, error) {
	table := nft.TableOf(nft.MasqueradeTable).Netlink()
	found, err := nft.CountRules(table, MasqueradeSets{Network: network}.chain(table).Name)
	return found[0] >= 2, err
}

// missingMasquerade returns the part of m that the kernel lacks.
func missingMasquerade(host *kernel.Node, m MasqueradeSets) (MasqueradeSets, error) {
	missing := MasqueradeSets{Network: m.Network}
	t, err := host.NFT.Open(nft.MasqueradeTable)
	if err != nil {
		return missing, err
	}
	for i, s := range m.sets() {
		into := []*[]netip.Prefix{&missing.Sources, &missing.Local}[i]
		for _, p := range s.prefixes {
			ok, err := covers(t, setName(s.kind, m.name(), p.Addr().Is4()), p)
			if err != nil {
				return missing, err
			}
			if !ok {
				*into = append(*into, p)
			}
		}
	}
	return missing, nil
}

type masqueradeSet struct {
	kind     string
	prefixes []netip.Prefix
}

func (m MasqueradeSets) sets() [2]masqueradeSet {
	return [...]masqueradeSet{{"pods", m.Sources}, {"local", m.Local}}
}

// covers tells whether one interval of a set holds the whole prefix. To a question for any address the kernel answers with the interval
// around it.
func covers(t *nft.Handle, set string, p netip.Prefix) (bool, error) {
	last := p.Masked().Addr().AsSlice()
	for bit := p.Bits(); bit < len(last)*8; bit++ {
		last[bit/8] |= 1 << (7 - bit%8)
	}
	begin, ok, err := t.Get(nft.Element{Set: set, Key: p.Masked().Addr().AsSlice()})
	if err != nil || !ok {
		return false, err
	}
	end, ok, err := t.Get(nft.Element{Set: set, Key: last})
	return ok && bytes.Equal(begin.Key, end.Key), err
}

// delMasquerade takes sources out of the network's set; those that are not in it are no error.
func delMasquerade(host *kernel.Node, m MasqueradeSets) error {
	if len(m.Sources) == 0 {
		return nil
	}
	t, err := host.NFT.Open(nft.MasqueradeTable)
	if err != nil {
		return nft.IgnoreUnsupported(err)
	}
	var errs []error
	for _, p := range m.Sources {
		elements := interval(setName("pods", m.name(), p.Addr().Is4()), p)
		_, ok, err := t.Get(elements[0])
		if ok && err == nil {
			err = t.Delete(elements)
		}
		errs = append(errs, nft.IgnoreUnsupported(fault.Ignore(err, unix.ENOENT)))
	}
	return errors.Join(errs...)
}

// endMasquerade removes the chain and the sets of a network; what is missing is no error.
func endMasquerade(m MasqueradeSets) error {
	if ok, err := nft.HasTable(nft.MasqueradeTable); err != nil || !ok {
		return err
	}
	return nft.Build("nft delete masquerade of network "+m.Network, func(c *nftables.Conn) error {
		table := c.AddTable(nft.TableOf(nft.MasqueradeTable).Netlink())
		// What is missing would end the transaction, so all is made first.
		chain := c.AddChain(m.chain(table))
		c.FlushChain(chain)
		c.DelChain(chain)
		for _, is4 := range []bool{true, false} {
			for _, kind := range []string{"pods", "local"} {
				set := m.set(table, kind, is4)
				if err := c.AddSet(set, nil); err != nil {
					return err
				}
				c.DelSet(set)
			}
		}
		return nil
	})
}

// interval returns the two elements that stand for a prefix in an interval set: its first address, and the first behind it.
func interval(set string, p netip.Prefix) []nft.Element {
	out := []nft.Element{{Set: set, Key: p.Masked().Addr().AsSlice()}}
	if end := after(p); end.IsValid() {
		out = append(out, nft.Element{Set: set, Key: end.AsSlice(), KeyEnd: true})
	}
	return out
}

// after returns the address behind a prefix; invalid when the prefix reaches the end of the address space.
func after(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for bit := p.Bits() - 1; bit >= 0; bit-- {
		mask := byte(1) << (7 - bit%8)
		b[bit/8] ^= mask
		if b[bit/8]&mask != 0 {
			addr, _ := netip.AddrFromSlice(b)
			return addr
		}
	}
	return netip.Addr{}
}

func (m MasqueradeSets) chain(table *nftables.Table) *nftables.Chain {
	policy := nftables.ChainPolicyAccept
	return &nftables.Chain{Table: table, Name: "network-" + m.name(), Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting,
		Priority: nftables.ChainPriorityNATSource, Policy: &policy}
}

func (m MasqueradeSets) set(table *nftables.Table, kind string, is4 bool) *nftables.Set {
	s := &nftables.Set{Table: table, Name: setName(kind, m.name(), is4), KeyType: nftables.TypeIPAddr, Interval: true}
	if !is4 {
		s.KeyType = nftables.TypeIP6Addr
	}
	return s
}

// build writes the table: for each network a base chain and four sets, for each family the sources that are masqueraded and the destinations that
// never are. A packet costs one lookup for each network, however many pods there are, and a pod whose network's subnets are in the set costs no
// change at all.
func (m MasqueradeSets) build(c *nftables.Conn) error {
	table := c.AddTable(nft.TableOf(nft.MasqueradeTable).Netlink())
	chain := c.AddChain(m.chain(table))
	c.FlushChain(chain)
	m.Local = append(m.multicast(), m.Local...)
	for _, is4 := range []bool{true, false} {
		var sets []*nftables.Set
		for _, s := range m.sets() {
			set := m.set(table, s.kind, is4)
			sets = append(sets, set)
			if err := c.AddSet(set, nil); err != nil {
				return err
			}
			c.FlushSet(set)
			if err := c.SetAddElements(set, setElements(set.Name, is4, distinct(s.prefixes))); err != nil {
				return err
			}
		}
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: masqueradeRule(is4, sets[0], sets[1]),
			UserData: userdata.AppendString(nil, userdata.TypeComment, fmt.Sprintf("network %.100s", m.Network))})
	}
	return nil
}

// distinct leaves out the prefixes that lie in another one, since the intervals of a set must not overlap.
func distinct(prefixes []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for i, p := range prefixes {
		inside := func(o netip.Prefix) bool { return o.Bits() < p.Bits() && o.Overlaps(p) }
		if !slices.ContainsFunc(prefixes, inside) && !slices.Contains(prefixes[:i], p) {
			out = append(out, p)
		}
	}
	return out
}

func (m MasqueradeSets) multicast() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix(multicast[0]), netip.MustParsePrefix(multicast[1])}
}

func setElements(set string, is4 bool, prefixes []netip.Prefix) []nftables.SetElement {
	var out []nftables.SetElement
	for _, p := range prefixes {
		if p.Addr().Is4() != is4 {
			continue
		}
		for _, e := range interval(set, p) {
			out = append(out, nftables.SetElement{Key: e.Key, IntervalEnd: e.KeyEnd})
		}
	}
	return out
}

// masqueradeRule is "saddr in pods, daddr not in local: masquerade".
func masqueradeRule(is4 bool, pods, local *nftables.Set) []expr.Any {
	proto, source, destination, length := byte(unix.NFPROTO_IPV4), uint32(source4), uint32(destination4), uint32(4)
	if !is4 {
		proto, source, destination, length = unix.NFPROTO_IPV6, source6, destination6, 16
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: source, Len: length},
		&expr.Lookup{SourceRegister: 1, SetName: pods.Name, SetID: pods.ID},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: destination, Len: length},
		&expr.Lookup{SourceRegister: 1, SetName: local.Name, SetID: local.ID, Invert: true},
		&expr.Masq{},
	}
}

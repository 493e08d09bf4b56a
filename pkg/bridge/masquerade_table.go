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
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
)

// MasqueradeSets is the content of a network's nftables sets. Traffic from Sources is masqueraded, unless it goes to Local or is multicast.
type MasqueradeSets struct {
	Network        string
	Sources, Local []netip.Prefix
}

// multicast returns the multicast ranges, which are never masqueraded: receivers do not answer the source (RFC 1112, RFC 4291).
func multicast() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("ff00::/8")}
}

func (m MasqueradeSets) name() string {
	sum := sha512.Sum512([]byte(m.Network))
	return hex.EncodeToString(sum[:8])
}

func (m MasqueradeSets) setName(kind, family string) string { return kind + family + "-" + m.name() }

func (m MasqueradeSets) setOf(kind string, p netip.Prefix) string {
	return m.setName(kind, nft.FamilyOf(p.Addr().Is4()).Digit)
}

func (m MasqueradeSets) chainName() string { return "network-" + m.name() }

// invalidName returns the name of the chain that drops packets which belong to no connection, and so would leave with the pod's address.
func (m MasqueradeSets) invalidName() string { return "invalid-" + m.name() }

func (m MasqueradeSets) chain(name string) nft.Place {
	return nft.Place{Family: unix.NFPROTO_INET, Table: nft.MasqueradeTable, Chain: name}
}

func (m MasqueradeSets) empty() bool { return len(m.Sources)+len(m.Local) == 0 }

// elements returns the set elements of all prefixes, each as one interval.
func (m MasqueradeSets) elements() (out []nft.Element) {
	for _, p := range m.Sources {
		out = append(out, interval(m.setOf("pods", p), p)...)
	}
	for _, p := range m.Local {
		out = append(out, interval(m.setOf("local", p), p)...)
	}
	return out
}

// addMasquerade adds prefixes that are missing in the network's sets (see missingMasquerade). The chain and the sets must exist. After
// unix.EEXIST, which means that a prefix overlaps with an existing interval, the caller must rewrite all intervals with SetMasquerade.
func addMasquerade(host *kernel.Node, m MasqueradeSets) error {
	t, err := host.NFT.Open(nft.MasqueradeTable)
	if err != nil {
		return err
	}
	if err := t.Add(m.elements()); err != nil {
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

// SetMasquerade replaces the network's chain and sets by new ones with the prefixes in m.
func SetMasquerade(m MasqueradeSets) error {
	return nft.Install("nft set masquerade of network "+m.Network, nft.MasqueradeTable, m.build, m.chainName(), m.invalidName())
}

// compareMasquerade returns an error with plugin.CodeStateDiffers unless the sets contain all prefixes in m and the rules are unchanged.
func compareMasquerade(host *kernel.Node, m MasqueradeSets) error {
	missing, err := missingMasquerade(host, m)
	if err != nil {
		return err
	}
	if len(missing.Sources) > 0 {
		return plugin.Differs("masquerade of %v is missing", missing.Sources)
	}
	t, err := host.NFT.Open(nft.MasqueradeTable)
	if err != nil {
		return err
	}
	if drift, err := t.Drift(MasqueradeSets{Network: m.Network}.build); err != nil {
		return err
	} else if drift != "" {
		return plugin.Differs("the nftables rules that masquerade network %s %s", m.Network, drift)
	}
	if len(missing.Local) > 0 {
		return plugin.Differs("the exception from masquerade for %v is missing", missing.Local)
	}
	return nil
}

// masqueradeChains returns the network's chains. has is false if there is none for packets of no connection.
func masqueradeChains(host *kernel.Node, network string) (leaving, invalid nft.Chain, has bool, err error) {
	t, err := host.NFT.Open(nft.MasqueradeTable)
	if err != nil {
		return leaving, invalid, false, err
	}
	m := MasqueradeSets{Network: network}
	if leaving, _, err = t.Chain(m.chain(m.chainName())); err == nil {
		invalid, has, err = t.Chain(m.chain(m.invalidName()))
	}
	return leaving, invalid, has, err
}

// lacksInvalid reports whether the network has all masquerade rules, and not the chain that drops packets of no connection, as those of an
// older version.
func lacksInvalid(host *kernel.Node, network string) bool {
	leaving, _, has, err := masqueradeChains(host, network)
	return err == nil && leaving.Uses == 2 && !has
}

// tolerateInvalid logs in CHECK that packets of no connection may leave with the pod's address, which harms no connection.
func (j *job) tolerateInvalid(err error) {
	j.r.Log.Warn("packets of no connection may leave with the pod's address until STATUS, the next ADD or 'podlace reload'", "error", err)
}

// hasMasqueradeRules reports whether both chains have a rule for each address family. The kernel keeps the count, so ADD can afford it.
func hasMasqueradeRules(host *kernel.Node, network string) (bool, error) {
	leaving, invalid, _, err := masqueradeChains(host, network)
	return leaving.Uses == 2 && invalid.Uses == 2, err
}

// missingMasquerade returns those prefixes of m that the kernel's sets lack.
func missingMasquerade(host *kernel.Node, m MasqueradeSets) (MasqueradeSets, error) {
	missing := MasqueradeSets{Network: m.Network}
	t, err := host.NFT.Open(nft.MasqueradeTable)
	if err == nil {
		missing.Sources, err = m.missing(t, "pods", m.Sources)
	}
	if err == nil {
		missing.Local, err = m.missing(t, "local", m.Local)
	}
	return missing, err
}

// missing returns those prefixes that no single interval of the sets contains. For an address, the kernel returns the interval that
// contains it, so missing asks for the first and last address of all prefixes in one batch.
func (m MasqueradeSets) missing(t *nft.Handle, kind string, prefixes []netip.Prefix) (missing []netip.Prefix, err error) {
	var ends []nft.Element
	for _, p := range prefixes {
		set := m.setOf(kind, p)
		ends = append(ends, nft.Element{Set: set, Key: p.Masked().Addr().AsSlice()}, nft.Element{Set: set, Key: lastAddress(p).AsSlice()})
	}
	found, err := t.Find(ends)
	if err != nil {
		return nil, err
	}
	for i, p := range prefixes {
		if first, last := found[2*i], found[2*i+1]; first == nil || last == nil || !bytes.Equal(first.Key, last.Key) {
			missing = append(missing, p)
		}
	}
	return missing, nil
}

// delMasquerade removes the sources in m from the network's set. It ignores those that are not there.
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
		elements := interval(m.setOf("pods", p), p)
		_, ok, err := t.Get(elements[0])
		if ok && err == nil {
			err = t.Delete(elements)
		}
		errs = append(errs, nft.IgnoreUnsupported(fault.Ignore(err, unix.ENOENT)))
	}
	return errors.Join(errs...)
}

// deleteMasquerade removes the chains and the sets of a network. It ignores those that do not exist.
func deleteMasquerade(m MasqueradeSets) error {
	if ok, err := nft.HasTable(nft.MasqueradeTable); err != nil || !ok {
		return err
	}
	return nft.Install("nft delete masquerade of network "+m.Network, nft.MasqueradeTable, func(r nft.Ruleset) error {
		chains, sets, err := m.createEmpty(r) // deleting a missing object would abort the transaction
		if err != nil {
			return err
		}
		for _, chain := range chains {
			r.C.DelChain(chain)
		}
		for _, set := range sets {
			r.C.DelSet(set)
		}
		return nil
	}, m.chainName(), m.invalidName())
}

// interval returns the two elements of a prefix in an interval set: its first address, and the first address after it.
func interval(set string, p netip.Prefix) []nft.Element {
	out := []nft.Element{{Set: set, Key: p.Masked().Addr().AsSlice()}}
	if end := addressAfter(p); end.IsValid() {
		out = append(out, nft.Element{Set: set, Key: end.AsSlice(), KeyEnd: true})
	}
	return out
}

func lastAddress(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for bit := p.Bits(); bit < len(b)*8; bit++ {
		b[bit/8] |= 1 << (7 - bit%8)
	}
	addr, _ := netip.AddrFromSlice(b)
	return addr
}

// addressAfter returns the first address after a prefix, or the zero Addr if there is none.
func addressAfter(p netip.Prefix) netip.Addr { return lastAddress(p).Next() }

// createEmpty creates the masquerade table with empty chains and sets for the network. It returns the chain that masquerades and the one
// that drops, and the sets in the order sources and excepted destinations, first of IPv4, then of IPv6.
func (m MasqueradeSets) createEmpty(r nft.Ruleset) ([]*nftables.Chain, []*nftables.Set, error) {
	chains := []*nftables.Chain{
		r.Chain(m.chainName(), nftables.ChainHookPostrouting, int(*nftables.ChainPriorityNATSource), nftables.ChainTypeNAT),
		r.Chain(m.invalidName(), nftables.ChainHookPostrouting, int(*nftables.ChainPriorityFilter), nftables.ChainTypeFilter)}
	var sets []*nftables.Set
	for _, f := range nft.Families() {
		for _, kind := range []string{"pods", "local"} {
			set := &nftables.Set{Table: r.Table, Name: m.setName(kind, f.Digit), KeyType: f.Address, Interval: true}
			if err := r.AddSet(set); err != nil {
				return nil, nil, err
			}
			r.C.FlushSet(set)
			sets = append(sets, set)
		}
	}
	return chains, sets, nil
}

// build writes the network's rules and elements. The kernel needs one set lookup per packet and network, however many pods it has, and a
// new pod in known subnets needs no change.
func (m MasqueradeSets) build(r nft.Ruleset) error {
	chains, sets, err := m.createEmpty(r)
	if err != nil {
		return err
	}
	comment := fmt.Sprintf("network %.100s", m.Network)
	for i, f := range nft.Families() {
		match := matchLeaving(f, sets[2*i], sets[2*i+1])
		r.Commented(chains[0], comment, append(match, &expr.Masq{}))
		r.Commented(chains[1], comment, slices.Concat(nft.Invalid(), match, nft.Drop()))
	}
	m.Sources, m.Local = distinct(m.Sources), distinct(append(multicast(), m.Local...))
	return r.AddElements(m.elements())
}

// distinct removes each prefix that is part of another one, because the intervals of a set must not overlap.
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

// matchLeaving matches packets with a source in pods and a destination outside local.
func matchLeaving(f nft.Family, pods, local *nftables.Set) []expr.Any {
	return append(f.Only(),
		nft.Network(1, f.Source, f.Length), &expr.Lookup{SourceRegister: 1, SetName: pods.Name, SetID: pods.ID},
		nft.Network(1, f.Destination, f.Length), &expr.Lookup{SourceRegister: 1, SetName: local.Name, SetID: local.ID, Invert: true})
}

// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/reference"
)

// Masquerade is what a network gives the node's address when it leaves the network.
type Masquerade struct {
	Backend string         `json:"backend"` // "", "nftables" or "iptables"
	V4      bool           `json:"v4"`
	V6      bool           `json:"v6"`
	Except  []netip.Prefix `json:"except,omitempty"` // destinations that see the pod's own address
}

// of returns those of the prefixes whose family is masqueraded.
func (m Masquerade) of(prefixes []netip.Prefix) (out []netip.Prefix) {
	for _, p := range prefixes {
		if p.Addr().Is4() && m.V4 || p.Addr().Is6() && m.V6 {
			out = append(out, p)
		}
	}
	return out
}

// masquerade makes traffic of the pod that leaves the network carry the node's address. With an IPAM plugin in process the
// subnets are known and shared by all pods, so that only the first pod of a network changes anything.
func (j *job) masquerade(l layer3) error {
	m := j.cfg.Masquerade
	if m.Backend == "nftables" {
		return j.masqueradeByNFT(l)
	}
	if m.Backend == "" {
		return j.endMasquerade()
	}
	// Pods that were masqueraded by nftables before the configuration was edited stay so.
	return masqueradeByIPTables(j.att.Key, m.of(l.Addresses), m.of(m.Except))
}

// endMasquerade: the subnets are masqueraded as a whole, so the newest configuration decides for the network.
func (j *job) endMasquerade() error {
	if _, noted := j.att.Noted(masqueraded); !noted {
		return nil
	}
	unlock, err := j.att.LockNetwork()
	if err != nil {
		return err
	}
	defer unlock()
	if err := endMasquerade(MasqueradeSets{Network: j.att.Network}); err != nil {
		return err
	}
	return j.att.Unnote(masqueraded)
}

// masqueraded notes that the network has a chain and sets in nftables, and for which configuration.
const masqueraded = "masqueraded"

// text is the note's.
func (m Masquerade) text() string {
	data, _ := json.Marshal(m)
	return string(data)
}

// masqueradeByNFT changes nothing when all that the pod needs is there, and adds what is missing. Everything is written anew, from the
// records of all attachments, when the configuration has changed, when subnets overlap, and after somebody flushed the rules.
func (j *job) masqueradeByNFT(l layer3) error {
	config := j.cfg.Masquerade.text()
	want := nftMasquerade(j.att.Network, j.cfg.Masquerade, l.Addresses, j.shared)
	missing, err := missingMasquerade(j.host, want)
	if err != nil {
		return err
	}
	if noted, _ := j.att.Noted(masqueraded); noted == config && missing.empty() {
		if ok, err := hasMasqueradeRules(j.att.Network); err != nil || ok {
			return err
		}
	}
	unlock, err := j.att.LockNetwork()
	if err != nil {
		return err
	}
	defer unlock()
	whole, err := hasMasquerade(j.host, j.att.Network)
	if err != nil {
		return err
	}
	if noted, _ := j.att.Noted(masqueraded); noted == config && whole {
		if err := addMasquerade(j.host, missing); !isExist(err) {
			return err
		}
	}
	all, _, err := allMasquerade(j.att.Network, j.cfg.Masquerade)
	if err != nil {
		return err
	}
	// The configuration is noted when it is in force: a kill before that writes everything once more.
	if err := j.att.Note(masqueraded, ""); err != nil {
		return err
	}
	if err := SetMasquerade(all); err != nil {
		return err
	}
	return j.att.Note(masqueraded, config)
}

// allMasquerade returns what all attachments of a network need, and what those of them have that are added whole.
func allMasquerade(network string, cfg Masquerade) (all, written MasqueradeSets, err error) {
	all.Network, written.Network = network, network
	records, err := attachment.List(network, "bridge")
	if err != nil {
		return all, written, err
	}
	add := func(to *MasqueradeSets, m MasqueradeSets) {
		to.Sources, to.Local = append(to.Sources, m.Sources...), append(to.Local, m.Local...)
	}
	for _, rec := range records {
		var st state
		if json.Unmarshal(rec.State, &st) != nil || st.Masquerade != "nftables" {
			continue
		}
		m := nftMasquerade(network, cfg, st.Addresses, st.Shared)
		add(&all, m)
		if !st.Unfinished {
			add(&written, m)
		}
	}
	for _, m := range []*MasqueradeSets{&all, &written} {
		m.Sources, m.Local = unique(m.Sources), unique(m.Local) // pods share subnets
	}
	return all, written, nil
}

func unique(prefixes []netip.Prefix) []netip.Prefix {
	slices.SortFunc(prefixes, netip.Prefix.Compare)
	return slices.Compact(prefixes)
}

func nftMasquerade(network string, cfg Masquerade, addresses []netip.Prefix, shared bool) MasqueradeSets {
	m := MasqueradeSets{Network: network, Local: cfg.of(cfg.Except)}
	for _, a := range cfg.of(addresses) {
		m.Local = append(m.Local, a.Masked())
		if shared {
			m.Sources = append(m.Sources, a.Masked())
		} else {
			m.Sources = append(m.Sources, netip.PrefixFrom(a.Addr(), a.Addr().BitLen()))
		}
	}
	return m
}

// unmasquerade takes back what masquerade made for one attachment, and notes that it did: who writes the network's sets anew meanwhile must
// not bring it back. Shared subnets stay for the other pods.
func unmasquerade(host *kernel.Node, att *attachment.Attachment, st *state) error {
	if st.Masquerade != "iptables" && (st.Masquerade != "nftables" || st.Shared) {
		return nil
	}
	unlock, err := att.LockNetwork()
	if err != nil {
		return err
	}
	defer unlock()
	if st.Masquerade == "iptables" {
		err = iptables.RemoveChain("POSTROUTING", masqueradeChain(att.Key))
	} else {
		err = delMasquerade(host, nftMasquerade(att.Network, Masquerade{V4: true, V6: true}, st.Addresses, false))
	}
	if err != nil {
		return err
	}
	st.Masquerade = ""
	att.Resave(*st)
	return nil
}

// The chain and rules are the reference's, by name and text, so that the reference plugin removes them after a rollback.
func masqueradeChain(key attachment.Key) string { return reference.Bridge(reference.Of(key)).Chain() }

func masqueradeByIPTables(key attachment.Key, addresses, except []netip.Prefix) error {
	for _, is4 := range []bool{true, false} {
		lines := masqueradeLines(key, is4, addresses, except)
		if len(lines) == 0 {
			continue
		}
		if err := replaceMasquerade(key, is4, lines); err != nil {
			return withHint(err)
		}
	}
	return nil
}

func replaceMasquerade(key attachment.Key, is4 bool, lines []string) error {
	table, err := iptables.Open(is4, true)
	if err != nil {
		return err
	}
	defer table.Close()
	return table.Apply(append(table.NAT().Deletions("POSTROUTING", masqueradeChain(key)), lines...))
}

// withHint says what to do about a missing program.
func withHint(err error) error {
	var program *iptables.MissingProgram
	if errors.As(err, &program) {
		return plugin.WithHint(err, "install iptables, or use the nftables backend, which needs no program")
	}
	return err
}

func masqueradeLines(key attachment.Key, is4 bool, addresses, except []netip.Prefix) []string {
	chain := masqueradeChain(key)
	comment := `-m comment --comment ` + iptables.Comment(fmt.Sprintf("name: %q id: %q", key.Network, key.ContainerID))
	lines := []string{":" + chain + " - [0:0]"}
	var jumps []string
	for _, a := range addresses {
		if a.Addr().Is4() == is4 {
			lines = append(lines, fmt.Sprintf("-A %s -d %s %s -j ACCEPT", chain, a.Masked(), comment))
			jumps = append(jumps, fmt.Sprintf("-A POSTROUTING -s %s %s -j %s", a.Addr(), comment, chain))
		}
	}
	if len(jumps) == 0 {
		return nil
	}
	for _, p := range except {
		if p.Addr().Is4() == is4 {
			lines = append(lines, fmt.Sprintf("-A %s -d %s %s -j ACCEPT", chain, p, comment))
		}
	}
	everywhere := map[bool]string{true: "224.0.0.0/4", false: "ff00::/8"}[is4]
	lines = append(lines, fmt.Sprintf("-A %s ! -d %s %s -j MASQUERADE", chain, everywhere, comment))
	return append(lines, jumps...)
}

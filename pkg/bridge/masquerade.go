// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/plugin"
)

// Masquerade is the masquerade configuration: it selects the packets whose source address the node replaces by its own.
type Masquerade struct {
	Backend string         `json:"backend"` // "", "nftables" or "iptables"
	V4      bool           `json:"v4"`
	V6      bool           `json:"v6"`
	Except  []netip.Prefix `json:"except,omitempty"` // destinations that see the pod's own address
	// Cluster is the number of CIDRs at the end of Except that replaced useClusterCidr, or 0 without this keyword.
	Cluster    int  `json:"cluster,omitempty"`
	UseCluster bool `json:"-"` // the configuration contains useClusterCidr
}

func (m Masquerade) ofMasqueradedFamilies(prefixes []netip.Prefix) (out []netip.Prefix) {
	for _, p := range prefixes {
		if p.Addr().Is4() && m.V4 || p.Addr().Is6() && m.V6 {
			out = append(out, p)
		}
	}
	return out
}

// applyMasquerade masquerades the pod's traffic that leaves the network. An in-process IPAM plugin reports the pods' subnets, so that one
// rule covers a whole subnet and only the network's first pod changes the rules.
func (j *job) applyMasquerade(l layer3) error {
	m := j.cfg.Masquerade
	if m.Backend == "nftables" {
		return j.masqueradeByNFT(l)
	}
	if m.Backend == "" {
		return j.removeNetworkMasquerade()
	}
	// After a change of the backend to iptables, the nftables rules stay, so existing pods are still masqueraded.
	return masqueradeByIPTables(j.att.Key, m.ofMasqueradedFamilies(l.Addresses), m.ofMasqueradedFamilies(m.Except), false)
}

// removeNetworkMasquerade removes the masquerade of all pods of the network, because they share the rules. The newest configuration
// decides.
func (j *job) removeNetworkMasquerade() error {
	if _, noted := attachment.ReadNote(j.att.Network, masqueradeNote); !noted {
		return nil
	}
	unlock, err := j.att.LockNetwork()
	if err != nil {
		return err
	}
	defer unlock()
	if err := deleteMasquerade(MasqueradeSets{Network: j.att.Network}); err != nil {
		return err
	}
	return attachment.RemoveNote(j.att.Network, masqueradeNote)
}

// masqueradeNote is the note file with the masquerade configuration. It exists while the network has a chain and sets in nftables.
const masqueradeNote = "masqueraded"

// noteText returns the configuration as the content of the note file.
func (m Masquerade) noteText() string {
	data, _ := json.Marshal(m)
	return string(data)
}

// notedMasquerade returns the masquerade configuration in the network's note file. ok is false if the file is missing, empty or damaged.
func notedMasquerade(network string) (m Masquerade, ok bool) {
	text, _ := attachment.ReadNote(network, masqueradeNote)
	err := json.Unmarshal([]byte(text), &m)
	return m, err == nil
}

// masqueradeByNFT adds what the pod lacks of the nftables chain, rules and set elements. It rewrites everything from the records of all
// attachments if the configuration changed, subnets overlap, or the rules were flushed.
func (j *job) masqueradeByNFT(l layer3) error {
	config := j.cfg.Masquerade.noteText()
	missing, err := missingMasquerade(j.host, nftMasquerade(j.att.Network, j.cfg.Masquerade, l.Addresses, j.shared))
	if err != nil {
		return err
	}
	if noted, _ := attachment.ReadNote(j.att.Network, masqueradeNote); noted == config && missing.empty() {
		if ok, err := hasMasqueradeRules(j.host, j.att.Network); err != nil || ok {
			return err
		}
	}
	unlock, err := j.att.LockNetwork()
	if err != nil {
		return err
	}
	defer unlock()
	if noted, _ := attachment.ReadNote(j.att.Network, masqueradeNote); noted == config {
		err := compareMasquerade(j.host, MasqueradeSets{Network: j.att.Network, Local: multicast()})
		if err == nil {
			err = addMasquerade(j.host, missing)
		}
		if !plugin.IsDifferent(err) && !isExist(err) {
			return err
		}
	}
	pods, err := attachment.States[state](attachment.List(j.att.Network, "bridge"))
	if err != nil {
		return err
	}
	m := j.cfg.Masquerade
	if m.UseCluster { // node.json may have changed while this ADD waited for the lock
		if _, node, err := nodefile.Read(); err == nil && len(node.ClusterCIDRs) > 0 {
			m = m.withClusterCIDRs(node.ClusterCIDRs)
		}
	}
	return writeMasquerade(j.att, m, pods)
}

// writeMasquerade replaces the chain and the sets of a network. It writes the note file last: if the process is killed before that, the
// next ADD finds an empty file and writes chain and sets again.
func writeMasquerade(att *attachment.Attachment, m Masquerade, pods []attachment.Of[state]) error {
	if err := attachment.WriteNote(att.Network, masqueradeNote, ""); err != nil {
		return err
	}
	if err := SetMasquerade(wantedMasquerade(att.Network, m, pods)); err != nil {
		return err
	}
	return attachment.WriteNote(att.Network, masqueradeNote, m.noteText())
}

// restoreMasquerade rewrites the chain and the sets of a network with pods if a rule or element is missing, except those that a running ADD
// is about to write. If the chain was flushed and no pod needs masquerade, it removes the note file.
func restoreMasquerade(host *kernel.Node, log *slog.Logger, att *attachment.Attachment, pods []attachment.Of[state]) error {
	m, noted := notedMasquerade(att.Network)
	if !noted {
		return nil
	}
	all, written := wantedMasquerade(att.Network, m, pods), wantedMasquerade(att.Network, m, finished(pods))
	written.Local = append(written.Local, multicast()...)
	err := compareMasquerade(host, written)
	switch {
	case !plugin.IsDifferent(err):
		return err
	case len(all.Sources) == 0:
		return attachment.RemoveNote(att.Network, masqueradeNote)
	case len(written.Sources) == 0:
		return nil
	}
	log.Info("masquerade is missing or was changed, and is restored from the records", "found", err)
	return SetMasquerade(all)
}

// wantedMasquerade computes the sets that the pods of a network need together.
func wantedMasquerade(network string, cfg Masquerade, pods []attachment.Of[state]) MasqueradeSets {
	all := MasqueradeSets{Network: network}
	for _, pod := range pods {
		if pod.State.Masquerade == "nftables" {
			m := nftMasquerade(network, cfg, pod.State.Addresses, pod.State.Shared)
			all.Sources, all.Local = append(all.Sources, m.Sources...), append(all.Local, m.Local...)
		}
	}
	all.Sources, all.Local = unique(all.Sources), unique(all.Local) // pods share subnets
	return all
}

func unique(prefixes []netip.Prefix) []netip.Prefix {
	slices.SortFunc(prefixes, netip.Prefix.Compare)
	return slices.Compact(prefixes)
}

func nftMasquerade(network string, cfg Masquerade, addresses []netip.Prefix, shared bool) MasqueradeSets {
	m := MasqueradeSets{Network: network, Local: cfg.ofMasqueradedFamilies(cfg.Except)}
	for _, a := range cfg.ofMasqueradedFamilies(addresses) {
		m.Local = append(m.Local, a.Masked())
		if shared {
			m.Sources = append(m.Sources, a.Masked())
		} else {
			m.Sources = append(m.Sources, netip.PrefixFrom(a.Addr(), a.Addr().BitLen()))
		}
	}
	return m
}

// removeMasquerade removes an attachment's masquerade from the kernel, and from the record so that a concurrent rewrite of the sets does
// not restore it. Subnets that other pods may share stay in the sets.
func removeMasquerade(host *kernel.Node, att *attachment.Attachment, st *state) error {
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
	att.SaveProgress(*st)
	return nil
}

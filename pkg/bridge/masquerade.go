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

// Masquerade is the masquerade configuration. It selects the packets whose source address the node replaces by its own address.
type Masquerade struct {
	Backend string         `json:"backend"` // "", "nftables" or "iptables"
	V4      bool           `json:"v4"`
	V6      bool           `json:"v6"`
	Except  []netip.Prefix `json:"except,omitempty"` // destinations that see the pod's own address
	// Cluster is the number of CIDRs that replaced the keyword useClusterCidr. The replacing CIDRs are at the end of the list Except. Cluster
	// is 0 if the configuration does not contain the keyword.
	Cluster    int  `json:"cluster,omitempty"`
	UseCluster bool `json:"-"` // the configuration contains useClusterCidr
}

// ofMasqueradedFamilies returns those prefixes whose address family (IPv4 or IPv6) is masqueraded.
func (m Masquerade) ofMasqueradedFamilies(prefixes []netip.Prefix) (out []netip.Prefix) {
	for _, p := range prefixes {
		if p.Addr().Is4() && m.V4 || p.Addr().Is6() && m.V6 {
			out = append(out, p)
		}
	}
	return out
}

// applyMasquerade sets up masquerade for the pod's traffic that leaves the network. An in-process IPAM plugin reports the pods' subnets.
// With such an IPAM plugin, one rule covers a whole subnet, so only the network's first pod must change the rules.
func (j *job) applyMasquerade(l layer3) error {
	m := j.cfg.Masquerade
	if m.Backend == "nftables" {
		return j.masqueradeByNFT(l)
	}
	if m.Backend == "" {
		return j.removeNetworkMasquerade()
	}
	// After a change of the backend to iptables, the nftables rules of the existing pods stay, so these pods are still masqueraded.
	return masqueradeByIPTables(j.att.Key, m.ofMasqueradedFamilies(l.Addresses), m.ofMasqueradedFamilies(m.Except))
}

// removeNetworkMasquerade removes the masquerade of the whole network. All pods of the network share the rules, so "ipMasq": false in the
// newest configuration applies to all of them.
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

// The constant `masqueradeNote` is the name of a note file which says that the network has a chain and sets in nftables. The note file
// contains the current masquerade configuration.
const masqueradeNote = "masqueraded"

// noteText formats the masquerade configuration as the text of the note file "masqueraded".
func (m Masquerade) noteText() string {
	data, _ := json.Marshal(m)
	return string(data)
}

// notedMasquerade returns the masquerade configuration that Podlace last wrote to the network's nftables sets. The second result is false
// if the note file is missing, empty or damaged.
func notedMasquerade(network string) (m Masquerade, ok bool) {
	text, _ := attachment.ReadNote(network, masqueradeNote)
	err := json.Unmarshal([]byte(text), &m)
	return m, err == nil
}

// masqueradeByNFT adds the nftables chain, rules and set elements that are missing for the pod. If nothing is missing, masqueradeByNFT
// changes nothing. masqueradeByNFT rewrites everything from the records of all attachments in three cases: the configuration changed,
// subnets overlap, or the rules were flushed.
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

// writeMasquerade replaces the chain and the sets of a network. The note file with the configuration is written last. If the process is
// killed before this last step, the next ADD finds an empty note file and writes the chain and the sets again.
func writeMasquerade(att *attachment.Attachment, m Masquerade, pods []attachment.Of[state]) error {
	if err := attachment.WriteNote(att.Network, masqueradeNote, ""); err != nil {
		return err
	}
	if err := SetMasquerade(wantedMasquerade(att.Network, m, pods)); err != nil {
		return err
	}
	return attachment.WriteNote(att.Network, masqueradeNote, m.noteText())
}

// restoreMasquerade rewrites the chain and the sets of a network that has pods, if any rule or set element is missing. Rules that a running
// ADD is about to write do not count as missing. If no pod needs masquerade and the chain was flushed, the note file is removed.
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

// removeMasquerade removes an attachment's masquerade from the kernel and from the record. If the masquerade stayed in the record, a
// concurrent rewrite of the network's sets would restore this masquerade in the kernel. Subnets that other pods may share stay in the sets.
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

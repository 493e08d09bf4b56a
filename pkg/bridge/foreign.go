// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"cmp"
	"encoding/json"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
)

// foreign returns an interval that another program put into a set of the network; it is empty if there is none. A subnet without pods stays
// in both sets until they are written anew, so an interval of both is none. It lists the sets, whose size depends on the number of subnets.
func (m MasqueradeSets) foreign(host *kernel.Node) (string, error) {
	t, err := host.NFT.Open(nft.MasqueradeTable)
	if err != nil {
		return "", err
	}
	own := MasqueradeSets{m.Network, distinct(m.Sources), distinct(append(multicast(), m.Local...))}.elements()
	for _, is4 := range []bool{true, false} {
		pods, local := m.setName("pods", is4), m.setName("local", is4)
		has := map[string][]string{}
		for _, set := range []string{pods, local} {
			elements, err := t.List(set)
			if err != nil {
				return "", err
			}
			has[set] = intervals(elements)
		}
		for set, other := range map[string]string{pods: local, local: pods} {
			known := append(intervals(slices.DeleteFunc(slices.Clone(own), func(e nft.Element) bool { return e.Set != set })), has[other]...)
			for _, i := range has[set] {
				if !slices.Contains(known, i) {
					return "nftables set " + set + " has " + i, nil
				}
			}
		}
	}
	return "", nil
}

// intervals returns the intervals of a set, each as its first address and the first one behind it.
func intervals(elements []nft.Element) (out []string) {
	points := slices.Clone(elements)
	slices.SortFunc(points, func(a, b nft.Element) int {
		if c := bytes.Compare(a.Key, b.Key); c != 0 || a.KeyEnd == b.KeyEnd {
			return c
		}
		if a.KeyEnd { // an interval ends before the next one begins
			return -1
		}
		return 1
	})
	for i, p := range points {
		if p.KeyEnd {
			continue
		}
		end := ""
		if i+1 < len(points) {
			end = address(points[i+1].Key)
		}
		out = append(out, address(p.Key)+"-"+end)
	}
	return out
}

func address(key []byte) string {
	a, _ := netip.AddrFromSlice(key)
	return a.String()
}

// checkForeign finds what another program added to the network's sets. It reads the records of other pods only if this pod does not explain
// an interval. Pods of another IPAM plugin are elements of their own, which CHECK does not list.
func (j *job) checkForeign(l layer3) error {
	if !j.shared || !attachment.Recorded(j.r) {
		return nil
	}
	m := nftMasquerade(j.att.Network, j.cfg.Masquerade, l.Addresses, true)
	if what, err := m.foreign(j.host); err != nil || what == "" {
		return err
	}
	pods, err := attachment.States[state](attachment.List(j.att.Network, "bridge"))
	if err != nil {
		return err
	}
	for _, cfg := range []Masquerade{j.cfg.Masquerade, notedMasquerade(j.att)} { // an edited configuration is not in force yet
		all := wantedMasquerade(j.att.Network, cfg, pods)
		m.Sources, m.Local = append(m.Sources, all.Sources...), append(m.Local, all.Local...)
	}
	what, err := m.foreign(j.host)
	if err != nil || what == "" {
		return err
	}
	return differs("%s, which no pod needs: it changes what network %s masquerades", what, j.att.Network)
}

// notedMasquerade returns the configuration for which the network's sets were written.
func notedMasquerade(att *attachment.Attachment) (m Masquerade) {
	text, _ := att.Noted(masqueraded)
	_ = json.Unmarshal([]byte(text), &m)
	return m
}

// allShared reports whether the pods share their subnets in the sets.
func allShared(pods []attachment.Of[state]) bool {
	return !slices.ContainsFunc(pods, func(pod attachment.Of[state]) bool {
		return pod.State.Masquerade == "nftables" && !pod.State.Shared
	})
}

// dropForeignGuards deletes entries of guarded ports that their guards do not have: each allows a pod an address or MAC of another. Entries
// of ports without a record stay: the record may be lost while the pod lives. The caller holds the lock of the guards.
func dropForeignGuards(host *kernel.Node, log *slog.Logger, pods []attachment.Of[state]) error {
	own := map[string]map[string]bool{} // sets and keys by port
	for _, pod := range finished(pods) {
		if pod.State.Guard == nil {
			continue
		}
		elements, err := pod.State.Guard.elements()
		if err != nil {
			return err
		}
		keys := map[string]bool{}
		for _, e := range elements {
			keys[e.Set+string(e.Key)] = true
		}
		own[string(nft.IfName(pod.State.Guard.Link))] = keys
	}
	if len(own) == 0 {
		return nil
	}
	t, err := host.NFT.Open(nft.GuardTable)
	if err != nil {
		return err
	}
	var foreign []nft.Element
	for _, set := range guardSets() {
		elements, e := t.List(set.name)
		err = cmp.Or(err, e)
		for _, e := range elements {
			port := nft.IfName("")
			copy(port, e.Key)
			if keys := own[string(port)]; keys != nil && !keys[e.Set+string(e.Key)] {
				foreign = append(foreign, e)
			}
		}
	}
	if err != nil || len(foreign) == 0 {
		return err
	}
	log.Warn("guards have entries that no pod needs; they are deleted", "entries", len(foreign), "set", foreign[0].Set)
	return t.Delete(foreign)
}

// checkRecord finds that the record of a pod is damaged or lost. Without a record the reference may have made the pod: it is ours if the
// host side has our name, and our rules guard or masquerade it and the reference's do not.
func (j *job) checkRecord(w wiring, l layer3) error {
	_, found, err := attachment.Checked[state](j.r)
	if err != nil || found || w.host.Name != j.att.HostVeth() {
		return err
	}
	if g := j.cfg.guardOf(w.host, w.pod, l, ""); g != nil && compareGuards(j.host, *g) == nil {
		return attachment.LostRecord(j.r)
	}
	m := j.cfg.Masquerade
	if m.Backend != "nftables" {
		return nil
	}
	if ok, err := j.masqueradedByReference(m.of(l.Addresses)); ok || err != nil {
		return err
	}
	if compareMasquerade(j.host, nftMasquerade(j.att.Network, m, l.Addresses, j.shared)) != nil {
		return nil
	}
	return attachment.LostRecord(j.r)
}

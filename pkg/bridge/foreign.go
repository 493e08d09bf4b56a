// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"cmp"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
)

// The type span is one interval of addresses in an nftables set.
type span struct {
	text     string // first address, and the first address after the interval
	elements []nft.Element
}

// foreignIntervals returns the address intervals that another program added to the network's nftables sets "pods" and "local". An interval
// that is in both sets is not foreign: Podlace writes each subnet to both sets, and leaves it there after the subnet's last pod is deleted.
// The cost of foreignIntervals grows with the number of subnets, because it lists both sets.
func (m MasqueradeSets) foreignIntervals(host *kernel.Node) (all []span, err error) {
	t, err := host.NFT.Open(nft.MasqueradeTable)
	if err != nil {
		return nil, err
	}
	own := MasqueradeSets{m.Network, distinct(m.Sources), distinct(append(multicast(), m.Local...))}.elements()
	for _, is4 := range []bool{true, false} {
		pods, local := m.setName("pods", is4), m.setName("local", is4)
		has := map[string][]span{}
		for _, set := range []string{pods, local} {
			elements, err := t.List(set)
			if err != nil {
				return nil, err
			}
			has[set] = intervals(elements)
		}
		for _, sets := range [][2]string{{pods, local}, {local, pods}} {
			ours := intervals(slices.DeleteFunc(slices.Clone(own), func(e nft.Element) bool { return e.Set != sets[0] }))
			for _, i := range has[sets[0]] {
				same := func(other span) bool { return other.text == i.text }
				if !slices.ContainsFunc(ours, same) && !slices.ContainsFunc(has[sets[1]], same) {
					all = append(all, i)
				}
			}
		}
	}
	return all, nil
}

func intervals(elements []nft.Element) (out []span) {
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
		one := span{address(p.Key) + "-", []nft.Element{p}}
		if i+1 < len(points) {
			one.text += address(points[i+1].Key)
			if points[i+1].KeyEnd {
				one.elements = append(one.elements, points[i+1])
			}
		}
		out = append(out, one)
	}
	return out
}

func address(key []byte) string {
	a, _ := netip.AddrFromSlice(key)
	return a.String()
}

// checkForeign returns an error if another program added an address interval to the network's nftables sets. checkForeign reads the records
// of other pods only if an interval does not belong to this pod. If an external IPAM plugin assigns the addresses, checkForeign does
// nothing: the sets contain one entry for each pod, so listing the sets would take too long.
func (j *job) checkForeign(l layer3) error {
	if !j.shared || !j.hasRecord {
		return nil
	}
	m := nftMasquerade(j.att.Network, j.cfg.Masquerade, l.Addresses, true)
	if what, err := m.foreignIntervals(j.host); err != nil || len(what) == 0 {
		return err
	}
	pods, err := attachment.States[state](attachment.List(j.att.Network, "bridge"))
	if err != nil {
		return err
	}
	noted, _ := notedMasquerade(j.att.Network)
	for _, cfg := range []Masquerade{j.cfg.Masquerade, noted} { // an edited configuration is not yet in force
		all := wantedMasquerade(j.att.Network, cfg, pods)
		m.Sources, m.Local = append(m.Sources, all.Sources...), append(m.Local, all.Local...)
	}
	what, err := m.foreignIntervals(j.host)
	if err != nil || len(what) == 0 {
		return err
	}
	return differs("nftables set %s has %s, which no pod needs: it changes what network %s masquerades", what[0].elements[0].Set, what[0].text,
		j.att.Network)
}

// allShared reports whether the network's nftables sets contain only whole subnets, and no addresses of single pods.
func allShared(pods []attachment.Of[state]) bool {
	return !slices.ContainsFunc(pods, func(pod attachment.Of[state]) bool {
		return pod.State.Masquerade == "nftables" && !pod.State.Shared
	})
}

// dropForeign deletes the address intervals that other programs added to the network's nftables sets. All other intervals stay, because
// they may belong to a live pod without a record.
func (m MasqueradeSets) dropForeign(host *kernel.Node, log *slog.Logger) error {
	all, err := m.foreignIntervals(host)
	if err != nil || len(all) == 0 {
		return err
	}
	t, err := host.NFT.Open(nft.MasqueradeTable)
	if err != nil {
		return err
	}
	var elements []nft.Element
	for _, i := range all {
		log.Warn("a set has an interval that no pod needs; it is deleted", "set", i.elements[0].Set, "interval", i.text)
		elements = append(elements, i.elements...)
	}
	return t.Delete(elements)
}

// dropForeignGuards deletes foreign entries from the nftables sets of antiSpoof and macspoofchk. An entry is foreign if its port has a
// record, and the record does not contain the entry. A foreign entry would allow a pod to use the address or MAC of another pod. Entries
// for ports without a record stay, because a live pod may have lost its record. The caller must hold the lock "guards".
func dropForeignGuards(host *kernel.Node, log *slog.Logger, pods []attachment.Of[state]) error {
	own := map[string]map[string]bool{} // keys by port and set
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

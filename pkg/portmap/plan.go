// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/json"
	"log/slog"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// claim is the request of an ADD: the ports of one attachment, its container and its pod.
type claim struct {
	ownedPorts
	container, pod string
}

// conflicts holds the elements and attachments that conflict with a claim.
type conflicts struct {
	elements []nft.Element     // elements with the same keys, and with the same ports in other sets
	holders  map[string]holder // other attachments that forward a port of the claim, by hash
}

// holder is another attachment that forwards a port of a claim.
type holder struct {
	attachment.Record
	found    bool          // its record exists
	gone     bool          // its pod's namespace is gone
	all      []recorded    // if it gives way: all attachments of its container
	elements []nft.Element // if the container is gone: all elements of these attachments
}

// yields reports whether the holder gives way: its pod is gone, or is an older pod of the same name.
func (h holder) yields(to claim) bool {
	return h.found && h.ContainerID != to.container && (h.gone || h.Pod != "" && h.Pod == to.pod)
}

// plan is the set of changes for a claim.
type plan struct {
	remove, add []nft.Element
	taken       []takeover
	shared      bool // a port is shared with a running pod
	singles     bool // a part of a range is shared: the claim must use single ports, which can pass from one attachment to another
}

// takeover is an attachment that gives way, and the first port that it loses.
type takeover struct {
	port  ports.Port
	owner string
	holder
}

// makePlan decides about each attachment that has a port of the claim. An attachment of the same container keeps the port. An attachment
// that gives way loses the port, or all its ports if its container is gone. Any other attachment makes the claim fail.
func makePlan(have conflicts, want claim) (p plan, err error) {
	var kept ports.Index
	for _, e := range have.elements {
		hash, port := ownerHash(e.Comment), portOf(e)
		h, other := have.holders[hash]
		switch {
		case !isForward(e) || !other, !h.found && h.gone:
		case !h.found:
			return plan{}, plugin.WithHint(plugin.Errorf(plugin.CodePortConflict, takenBy, port, ownerName(e.Comment)),
				"its record is lost; DEL of its container ends it")
		case h.ContainerID == want.container: // in another network, or with another interface
			kept.Add(e.Comment, port)
			p.shared = true
			continue
		case !h.yields(want):
			return plan{}, plugin.Errorf(plugin.CodePortConflict, takenBy, port, describeOwner(h.Record, e.Comment))
		case !slices.ContainsFunc(p.taken, func(t takeover) bool { return t.Key == h.Key }):
			p.taken = append(p.taken, takeover{port, e.Comment, h})
			p.remove = append(p.remove, h.elements...)
			p.shared = p.shared || !h.gone
		}
		p.remove = append(p.remove, e)
	}
	p.remove = uniqueElements(p.remove)
	for _, e := range want.elements() {
		if !isForward(e) || !kept.Overlap(portOf(e), "") {
			p.add = append(p.add, e)
		} else if !kept.Covers(portOf(e)) {
			p.singles = true
		}
	}
	return p, nil
}

const takenBy = "hostPort %s is in use by %s"

// displaced returns all attachments of the containers that give way, in all networks, because attachments that share a port have rules too.
func (p plan) displaced() (all []recorded) {
	for _, t := range p.taken {
		for _, rec := range t.all {
			if !slices.ContainsFunc(all, func(o recorded) bool { return o.Key == rec.Key }) {
				all = append(all, rec)
			}
		}
	}
	return all
}

// planFor observes the node and makes a plan.
func planFor(host *kernel.Node, want claim) (plan, error) {
	have, err := observe(host, want)
	if err != nil {
		return plan{}, err
	}
	return makePlan(have, want)
}

// observe reads the conflicts of a claim. It looks up the keys of the claim, and reads the records of the owners.
func observe(host *kernel.Node, want claim) (have conflicts, err error) {
	t, err := host.NFT.Open(nft.HostportTable)
	if err != nil {
		return conflicts{}, err
	}
	if have.elements, err = clashes(t, want.ownedPorts, want.elements()); err != nil {
		return conflicts{}, err
	}
	have.holders = map[string]holder{}
	for _, e := range have.elements {
		hash := ownerHash(e.Comment)
		if _, known := have.holders[hash]; known || !isForward(e) || hash == ownerHash(want.Owner) {
			continue
		}
		if have.holders[hash], err = observeHolder(t, hash, want); err != nil {
			return conflicts{}, err
		}
	}
	return have, nil
}

func observeHolder(t *nft.Handle, hash string, want claim) (h holder, err error) {
	if h.Record, h.found, err = attachment.ByHash("portmap", hash); err != nil {
		return holder{}, err
	}
	if !h.found {
		e, ok, err := t.Get(ownerElement(hash))
		h.gone = ok && plugin.NetnsGone(ownerOf(e).Netns)
		return h, err
	}
	if h.gone = plugin.NetnsGone(h.Netns); !h.yields(want) {
		return h, nil
	}
	records, err := attachment.AllOf("portmap")
	for _, rec := range records {
		of := recorded{Record: rec}
		if rec.ContainerID != h.ContainerID || json.Unmarshal(rec.State, &of.state) != nil {
			continue
		}
		h.all = append(h.all, of)
		if h.gone && err == nil {
			var lost []nft.Element
			lost, err = ownedBy(t, of.hostPorts(of.owner()))
			h.elements = append(h.elements, lost...)
		}
	}
	return h, err
}

// merge adds takeovers to those of an earlier plan.
func merge(earlier, more []takeover) []takeover {
	for _, m := range more {
		if !slices.ContainsFunc(earlier, func(t takeover) bool { return t.Key == m.Key }) {
			earlier = append(earlier, m)
		}
	}
	return earlier
}

// logTakeovers logs the attachments that gave way.
func (p plan) logTakeovers(want claim, log *slog.Logger) {
	for _, h := range p.taken {
		log.Warn("a hostPort is taken over", "port", h.port.String(), "from", ownerName(h.owner), "container", h.ContainerID,
			"samePod", h.Pod != "" && h.Pod == want.pod)
	}
}

// apply applies a plan in one transaction.
func apply(host *kernel.Node, want claim, p plan) error {
	t, err := host.NFT.Open(nft.HostportTable)
	if err != nil {
		return err
	}
	if p.shared {
		if err := attachment.NoteNode(sharedPorts, someShared); err != nil {
			return err
		}
	}
	if err := t.Replace(p.remove, p.add); err != nil || want.Bridge == "" || want.Taken {
		return err
	}
	return ensureHairpin(t, want.Bridge)
}

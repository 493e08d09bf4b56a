// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"log/slog"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// portClaim contains the ports that an ADD requests, and the container and pod of its attachment.
type portClaim struct {
	ownedPorts
	container, pod string
}

// portConflicts holds the set elements and attachments that conflict with a claim.
type portConflicts struct {
	elements []nft.Element         // elements with the same keys, and with the same ports in other sets
	holders  map[string]portHolder // other attachments that forward a port of the claim, by hash
}

// portHolder owns a port that another attachment requests.
type portHolder struct {
	attachment.Record
	found    bool            // its record exists
	gone     bool            // its pod's namespace is gone
	all      []recordedPorts // if it gives way: all attachments of its container
	elements []nft.Element   // if the container is gone: all elements of these attachments
}

// mustYield reports whether the holder must give up its ports, because its pod is gone or is an older one of the same name.
func (h portHolder) mustYield(to portClaim) bool {
	return h.found && h.ContainerID != to.container && (h.gone || h.Pod != "" && h.Pod == to.pod)
}

// claimPlan contains the changes that give an attachment its requested ports.
type claimPlan struct {
	remove, add []nft.Element
	taken       []portTakeover
	singles     bool // a part of a range is shared: the claim must use single ports, which can pass from one attachment to another
}

// portTakeover is an attachment that gives up ports, and the first of these.
type portTakeover struct {
	port  ports.Port
	owner string
	portHolder
}

// makePlan decides about each attachment that already has a requested port. One of the same container keeps it, one whose container is gone
// loses all its ports, and one of an older pod of the same name loses only the requested port. Any other makes the plan fail.
func makePlan(have portConflicts, want portClaim) (p claimPlan, err error) {
	var kept ports.Index
	for _, e := range have.elements {
		h, other := have.holders[ownerHash(e.Comment)]
		switch {
		case !isForward(e) || !other, !h.found && h.gone:
		case !h.found:
			return claimPlan{}, takenBy(portOf(e), ownerName(e.Comment), "its record is lost; DEL of its container ends it")
		case h.ContainerID == want.container: // in another network, or with another interface
			kept.Add(e.Comment, portOf(e))
			want.HasHeirs = true
			p.remove = append(p.remove, e)
			e.Comment = withHeirs(e.Comment)
			p.add = append(p.add, e)
			continue
		case !h.mustYield(want):
			return claimPlan{}, takenBy(portOf(e), describeOwner(h.Record, e.Comment), "delete that pod, or choose another hostPort")
		case !slices.ContainsFunc(p.taken, func(t portTakeover) bool { return t.Key == h.Key }):
			p.taken = append(p.taken, portTakeover{portOf(e), e.Comment, h})
			p.remove = append(p.remove, h.elements...)
			want.HasHeirs = want.HasHeirs || !h.gone
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

// takenBy returns the error for a port that another attachment has.
func takenBy(p ports.Port, by, hint string) error {
	return plugin.WithHint(plugin.Errorf(plugin.CodePortConflict, "hostPort %s is in use by %s", p, by), "%s", hint)
}

// displacedAttachments returns the attachments, in all networks, of the containers that lose ports: if two of them share a port, both may
// have rules for it.
func (p claimPlan) displacedAttachments() (all []recordedPorts) {
	for _, t := range p.taken {
		for _, rec := range t.all {
			if !slices.ContainsFunc(all, func(o recordedPorts) bool { return o.Key == rec.Key }) {
				all = append(all, rec)
			}
		}
	}
	return all
}

// planFor plans how to take the requested ports on this node.
func planFor(host *kernel.Node, want portClaim) (claimPlan, error) {
	have, err := readConflicts(host, want)
	if err != nil {
		return claimPlan{}, err
	}
	return makePlan(have, want)
}

// readConflicts looks up the keys of the requested ports and reads the records of their owners.
func readConflicts(host *kernel.Node, want portClaim) (have portConflicts, err error) {
	t, err := host.NFT.Open(nft.HostportTable)
	if err != nil {
		return portConflicts{}, err
	}
	if have.elements, err = conflictingElements(t, want.ownedPorts, want.elements()); err != nil {
		return portConflicts{}, err
	}
	have.holders = map[string]portHolder{}
	for _, e := range have.elements {
		hash := ownerHash(e.Comment)
		if _, known := have.holders[hash]; known || !isForward(e) || hash == ownerHash(want.Owner) {
			continue
		}
		if have.holders[hash], err = observeHolder(host, hash, want); err != nil {
			return portConflicts{}, err
		}
	}
	return have, nil
}

func observeHolder(host *kernel.Node, hash string, want portClaim) (h portHolder, err error) {
	if h.Record, h.found, err = attachment.ByHash("portmap", hash); err != nil {
		return portHolder{}, err
	}
	if !h.found {
		owner, ok, err := findOwner(host, hash)
		h.gone = ok && plugin.NetnsGone(owner.Netns)
		return h, err
	}
	if h.gone = plugin.NetnsGone(h.Netns); !h.mustYield(want) {
		return h, nil
	}
	records, err := attachment.AllOf("portmap")
	for _, rec := range records {
		st, e := attachment.StateOf[portState](rec)
		if e != nil || rec.ContainerID != h.ContainerID {
			continue
		}
		of := recordedPorts{Record: rec, portState: st}
		h.all = append(h.all, of)
		if h.gone && err == nil {
			var lost []nft.Element
			lost, err = ownedBy(host, of.hostPorts(of.owner()))
			h.elements = append(h.elements, lost...)
		}
	}
	return h, err
}

// logTakeovers logs the attachments that lost ports.
func (p claimPlan) logTakeovers(want portClaim, log *slog.Logger) {
	for _, h := range p.taken {
		log.Warn("a hostPort is taken over", "port", h.port.String(), "from", ownerName(h.owner), "container", h.ContainerID,
			"samePod", h.Pod != "" && h.Pod == want.pod)
	}
}

// applyPlan makes the changes of a plan in one transaction.
func applyPlan(host *kernel.Node, want portClaim, p claimPlan) error {
	t, err := host.NFT.Open(nft.HostportTable)
	if err != nil {
		return err
	}
	if err := t.Replace(p.remove, p.add); err != nil || want.Bridge == "" || want.ByIPTables {
		return err
	}
	return ensureHairpin(t, want.Bridge)
}

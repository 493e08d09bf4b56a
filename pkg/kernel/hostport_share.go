// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"slices"

	"github.com/podlace/podlace/pkg/nft"
)

// ErrShared is returned by callers of AddHostPorts for an owner that shares a port, and by AddHostPorts itself for a range of which another
// owner shares a part: then the caller has to ask for single ports.
var ErrShared = errors.New("the port is shared")

// PortIndex finds hostPorts that overlap, without comparing each with all.
type PortIndex struct {
	singles map[uint16][]namedPort
	ranges  []namedPort
}

// namedPort is a port and the name that it was added with.
type namedPort struct {
	HostPort
	name string
}

// Add adds ports under a name.
func (x *PortIndex) Add(name string, ports ...HostPort) {
	for _, p := range ports {
		if p.Last != 0 {
			x.ranges = append(x.ranges, namedPort{p, name})
			continue
		}
		if x.singles == nil {
			x.singles = map[uint16][]namedPort{}
		}
		x.singles[p.Port] = append(x.singles[p.Port], namedPort{p, name})
	}
}

// Overlap reports whether p overlaps a port that was added under another name than except.
func (x *PortIndex) Overlap(p HostPort, except string) bool {
	clash := func(o namedPort) bool { return o.name != except && p.Overlaps(o.HostPort) }
	for port := int(p.Port); port <= int(p.last()) && len(x.singles) > 0; port++ {
		if slices.ContainsFunc(x.singles[uint16(port)], clash) {
			return true
		}
	}
	return slices.ContainsFunc(x.ranges, clash)
}

// covers reports whether one entry of the index overlaps all ports of p.
func (x *PortIndex) covers(p HostPort) bool {
	if p.Last == 0 {
		return x.Overlap(p, "")
	}
	return slices.ContainsFunc(x.ranges, func(o namedPort) bool { return p.Overlaps(o.HostPort) && o.Port <= p.Port && o.Last >= p.Last })
}

// withoutShared returns the elements that do not forward a shared port.
func withoutShared(elements []nft.Element, shared PortIndex) (own []nft.Element, err error) {
	for _, e := range elements {
		if !isForward(e) || !shared.Overlap(portOf(e), "") {
			own = append(own, e)
		} else if !shared.covers(portOf(e)) {
			return nil, fmt.Errorf("hostPort %s: %w in part", portOf(e), ErrShared)
		}
	}
	return own, nil
}

// PassHostPorts gives the ports that an owner forwards to the attachments that ask for them, in one transaction. Ports of a third owner, and ports
// that no attachment asks for, stay where they are. It is a no-op while the rules are missing. The caller holds the lock of AddHostPorts.
func (n *Node) PassHostPorts(owner string, to []HostPorts) error {
	if ok, err := n.marked(nft.HostportTable, schema); err != nil || !ok {
		return nft.IgnoreUnsupported(err)
	}
	t, err := n.NFT.Open(nft.HostportTable)
	if err != nil {
		return err
	}
	var want []nft.Element
	for _, h := range to {
		want = append(want, h.elements()...)
	}
	want = once(want)
	has, err := t.Find(want)
	if err != nil {
		return err
	}
	var passed, missing []nft.Element
	for i, e := range want {
		if has[i] != nil && OwnerHash(has[i].Comment) != OwnerHash(owner) {
			continue
		}
		missing = append(missing, e)
		if has[i] != nil {
			passed = append(passed, *has[i])
		}
	}
	return t.Replace(once(passed), missing)
}

// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"errors"
	"fmt"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/ports"
)

// errShared is returned by callers of addHostPorts for an owner that shares a port, and by addHostPorts itself for a range of which another
// owner shares a part: then the caller has to ask for single ports.
var errShared = errors.New("the port is shared")

// withoutShared returns the elements that do not forward a shared port.
func withoutShared(elements []nft.Element, shared ports.Index) (own []nft.Element, err error) {
	for _, e := range elements {
		if !isForward(e) || !shared.Overlap(portOf(e), "") {
			own = append(own, e)
		} else if !shared.Covers(portOf(e)) {
			return nil, fmt.Errorf("hostPort %s: %w in part", portOf(e), errShared)
		}
	}
	return own, nil
}

// passHostPorts gives the ports that an owner forwards to the attachments that ask for them, in one transaction. Ports of a third owner, and ports
// that no attachment asks for, stay where they are. It is a no-op while the rules are missing. The caller holds the lock of addHostPorts.
func passHostPorts(host *kernel.Node, owner string, to []owned) error {
	if ok, err := marked(host, nft.HostportTable, schema); err != nil || !ok {
		return nft.IgnoreUnsupported(err)
	}
	t, err := host.NFT.Open(nft.HostportTable)
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
		if has[i] != nil && ownerHash(has[i].Comment) != ownerHash(owner) {
			continue
		}
		missing = append(missing, e)
		if has[i] != nil {
			passed = append(passed, *has[i])
		}
	}
	return t.Replace(once(passed), missing)
}

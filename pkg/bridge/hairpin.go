// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
)

// addHairpinRules drops broadcast and multicast frames that a port with hairpin mode would get back. If a tenant reflected them, they would
// circle for ever, and reach all neighbours each time. A port with spoof protection gets only frames for the pod's MAC back, with which the
// pod reaches its own hostPort; other pods may have more MACs, for example of macvlans. nftables cannot compare two registers, so the set
// has the port's name twice.
func (g guardRules) addHairpinRules() {
	forward := g.Chain("forward", nftables.ChainHookForward, guardPriority, nftables.ChainTypeFilter)
	outputLink := &expr.Meta{Key: expr.MetaKeyOIFNAME, Register: regValue}
	back := g.part(forward, "hairpin", g.ownedByPort(outputLink, "hairpin")...)
	g.Rule(back, slices.Concat(isGroup(), nft.Drop())...)
	guarded := []expr.Any{inputLink(), g.lookup("mac_ports", false)}
	g.Rule(back, slices.Concat(guarded, g.notOwnedByPort(etherDestination(), "macs"), nft.Drop())...)
}

// isGroup matches broadcast and multicast destinations, by the lowest bit of their first octet.
func isGroup() []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseLLHeader, Offset: 0, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{1}, Xor: []byte{0}}, nft.Equal([]byte{1})}
}

func etherDestination() expr.Any {
	return &expr.Payload{DestRegister: regValue, Base: expr.PayloadBaseLLHeader, Offset: 0, Len: 6}
}

// guardOf returns the guard that the pod's port needs. On a kernel without nftables for bridges it is nil if only hairpin mode needs one,
// so that pods start with every configuration of the reference plugin.
func (j *job) guardOf(w wiring, l layer3, owner string) *Guard {
	g := j.cfg.guardOf(w.host, w.pod, l, owner)
	if g == nil || g.checksSources() {
		return g
	}
	var missing *kernel.MissingFeature
	if err := compareGuards(j.host); errors.As(err, &missing) {
		j.r.Log.Warn("a tenant can make broadcasts circle through the pod's hairpinMode port", "error", err)
		return nil
	}
	return g
}

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

// addHairpinRules drops what a port with hairpin mode would get back of its own frames, except those for the pod's MAC, with which the pod
// reaches its own hostPort. A tenant that reflects broadcast, multicast or unknown unicast frames, which also reach all neighbours, would
// otherwise make them circle for ever. nftables cannot compare two registers, so the set has the port's name twice.
func (g guardRules) addHairpinRules() {
	forward := g.Chain("forward", nftables.ChainHookForward, guardPriority, nftables.ChainTypeFilter)
	outputLink := &expr.Meta{Key: expr.MetaKeyOIFNAME, Register: regValue}
	g.Rule(forward, slices.Concat(g.ownedByPort(outputLink, "hairpin"), g.notOwnedByPort(etherDestination(), "macs"), nft.Drop())...)
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
		return nil
	}
	return g
}

// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"net/netip"

	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/kernel"
)

// routes asks the kernel for the routes to and from each live pod, because a routing rule (ip-rule(8)) or a route of another program can
// lead packets to another link. It reports one pod for each bridge and direction.
func (n *node) routes() (found []Finding) {
	records, err := bridge.Gateways()
	found = unknown("the records of bridge", err)
	bridges := map[string]kernel.Link{}
	reported := map[string]bool{}
	forwards := len(n.forwarding()) == 0
	for _, rec := range records {
		pod := n.attachment(rec.Key)
		if pod == nil || pod.State != reconcile.Alive || len(rec.Gateways) == 0 {
			continue
		}
		link, ok := bridges[rec.Bridge]
		if !ok {
			link, _, _ = n.host.Link(rec.Bridge) // the check "ports" reports a missing bridge
			bridges[rec.Bridge] = link
		}
		if link.Index == 0 || link.Master != 0 { // the pods of a bridge in a VRF have routes in the table of the VRF
			continue
		}
		for _, addr := range pod.Addresses {
			for _, f := range n.routesOf(addr, link, forwards) {
				if !reported[f.What] {
					reported[f.What] = true
					found = append(found, f)
				}
			}
		}
	}
	return found
}

// routesOf checks the routes of packets to and from a pod.
func (n *node) routesOf(pod netip.Addr, link kernel.Link, forwards bool) (found []Finding) {
	report := func(what, evidence, consequence, lookup string) {
		family := "-4"
		if pod.Is6() {
			family = "-6"
		}
		found = append(found, Finding{Level: Error, What: what, Evidence: evidence, Consequence: consequence,
			Command: fmt.Sprintf("ip %s rule; ip %s; then remove the rule or the route that matches", family, lookup)})
	}
	index, err := n.host.RouteTo(pod)
	switch {
	case kernel.NoRoute(err):
		report("the node has no route to the pods of "+link.Name, err.Error(), "nothing reaches these pods", fmt.Sprintf("route get %s", pod))
	case err == nil && index != link.Index:
		report("the node's route to the pods of "+link.Name+" leads to another link",
			fmt.Sprintf("the kernel sends packets for %s to %s", pod, n.linkName(index)), "these packets do not reach the pods",
			fmt.Sprintf("route get %s", pod))
	}
	outside := netip.MustParseAddr("198.51.100.1") // documentation addresses (RFC 5737, RFC 3849): only the default route leads there
	if pod.Is6() {
		outside = netip.MustParseAddr("2001:db8:ffff::1")
	}
	if _, err := n.host.RouteTo(outside); err != nil || !forwards {
		return found // the node itself cannot send there, or forwards nothing
	}
	if err := n.host.CanForward(link, pod, outside); kernel.NoRoute(err) {
		report("packets from the pods of "+link.Name+" have no route, although the node has one", err.Error(),
			"these pods do not reach addresses outside the node", fmt.Sprintf("route get %s from %s iif %s", outside, pod, link.Name))
	}
	return found
}

func (n *node) linkName(index int) string {
	link, ok, err := n.host.LinkByIndex(index)
	if err != nil || !ok {
		return fmt.Sprintf("the link with index %d", index)
	}
	return link.Name
}

// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/agent/noderoutes"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nodefile"
)

// route compares the kernel's routes with those that the cluster's nodes need. It changes nothing before a complete list with this node has
// come.
func (a *agent) route(why cause) {
	list, since, complete := a.nodes.list()
	if !complete {
		return
	}
	a.advice, a.routesFailed, a.nextSync = nil, false, time.Now().Add(compareEvery)
	own := slices.IndexFunc(list, func(n noderoutes.Node) bool { return n.Name == a.Node })
	if own >= 0 {
		a.self = list[own]
	} else if a.self.Name != "" {
		list = append(list, a.self)
		a.advise("own node", errors.New("its Node object is gone: routes and node.json stay as they are"), "register the node again", false)
	}
	began := time.Now()
	err := a.apply(why, list, own < 0)
	if err != nil {
		a.routesFailed = true
		return
	}
	a.metrics.noteSync(began, since)
	a.syncDuration = time.Since(began)
}

// advise adds a problem to the agent's status, where it stays until the next comparison of the routes.
func (a *agent) advise(what string, err error, do string, blocking bool) {
	a.advice = append(a.advice, Problem{What: what, Why: err.Error(), Do: do, blocking: blocking})
}

// apply writes the routes to all nodes of a list into the kernel.
func (a *agent) apply(why cause, list []noderoutes.Node, selfGone bool) error {
	host, err := kernel.Host()
	if err != nil {
		a.advise("routes", err, retries, true)
		return err
	}
	defer host.Close()
	cfg, err := a.planConfig(&host.NS)
	if err != nil {
		a.advise("routes", err, retries, true)
		return err
	}
	self, peers, err := noderoutes.Peers(list, cfg)
	if err != nil {
		a.adviseSelf(err)
		return nil // a further event follows
	}
	want, peers, node := noderoutes.Plan(self, peers, noderoutes.Ways(&host.NS, gateways(self, peers)), cfg)
	hold := false
	for _, advice := range want.Advice {
		a.advise(advice.What, errors.New(advice.Why), advice.Do, advice.BlocksPods)
		hold = hold || advice.BlocksPods
	}
	if !a.config.Routes {
		a.peers = nil
		a.setNode(node, hold)
		return nil
	}
	if a.syncStart.IsZero() {
		a.syncStart = time.Now()
	}
	a.enableForwarding(&host.NS, why, node.PodCIDRs)
	result, err := a.change(&host.NS, want, why, selfGone)
	if err != nil {
		a.advise("routes", err, retries, true)
		return err
	}
	a.logChanges("route", why, result.Changes, "changed routes", "changes", result.Changes, "peers", len(peers))
	if why == onKernel {
		a.metrics.removals.Add(float64(result.Changes))
	}
	if result.Other != nil {
		a.routesFailed = true
		a.advise("routes", result.Other, retries, false)
	}
	a.setPeers(peers, result)
	a.metrics.setRoutes(result.Has)
	if a.deletionsHeld {
		node.ClusterCIDRs = a.withKeptCIDRs(node.ClusterCIDRs)
	}
	a.adviseInside(peers)
	a.setNode(node, hold)
	return nil
}

// enableForwarding enables forwarding for the families of the node's pods, as ADD does. A node without pods needs it too, for connections
// to Services that come in through it.
func (a *agent) enableForwarding(host *kernel.NS, why cause, podCIDRs []netip.Prefix) {
	for _, is4 := range []bool{true, false} {
		if !slices.ContainsFunc(podCIDRs, func(c netip.Prefix) bool { return c.Addr().Is4() == is4 }) {
			continue
		}
		changed, err := host.EnableForwarding(is4)
		if changed {
			a.logChanges("forwarding", why, 1, "enabled forwarding, without which the node connects no pods", "ipv4", is4)
		}
		if err != nil {
			a.routesFailed = true
			a.advise("forwarding", err, forwardingRemedy(is4), false)
		}
	}
}

func forwardingRemedy(is4 bool) string {
	if is4 {
		return "sysctl -w net.ipv4.ip_forward=1"
	}
	return "set accept_ra=2 on links with a default route from a router advertisement, then sysctl -w net.ipv6.conf.all.forwarding=1"
}

// change writes the wanted routes into the kernel, and deletes the agent's other ones if the list of nodes can be trusted. It also reads
// the routes of other programs in the first and in periodic comparisons, and in each one while they conflict.
func (a *agent) change(host *kernel.NS, want noderoutes.Wanted, why cause, selfGone bool) (noderoutes.Result, error) {
	inside := a.moreSpecific == nil || why == onStart || why == onPeriod || len(a.moreSpecific) > 0
	result, err := noderoutes.Apply(host, want, noderoutes.Options{Keep: true, Adopt: a.config.Adopt, Inside: inside})
	if err != nil {
		return result, err
	}
	if inside {
		a.moreSpecific = result.Inside
	}
	if result.Kept > 0 && a.deletionsTrusted(result, selfGone) {
		changes := result.Changes
		result, err = noderoutes.Apply(host, want, noderoutes.Options{Adopt: a.config.Adopt})
		result.Changes += changes
	} else if result.Kept == 0 {
		a.deletionsHeld, a.suspectSince = false, time.Time{}
	}
	return result, err
}

// setNode sets the wanted content of node.json. With hold, a missing node.json is not created and an existing one keeps its MTU.
func (a *agent) setNode(node nodefile.Node, hold bool) {
	if hold {
		file, before, err := nodefile.Read()
		if err != nil || file != nodefile.Path {
			return
		}
		node.MTU = before.MTU
	}
	a.node = node
}

func (a *agent) adviseSelf(err error) {
	do := ""
	if wrong := (*noderoutes.SelfError)(nil); errors.As(err, &wrong) {
		do = wrong.Do
	}
	a.advise("own node", err, do, a.node.PodCIDRs == nil)
}

// retries is the advice for errors of the kernel.
const retries = "nothing, if it ends within minutes: the agent tries again"

// adviseInside reports routes of other programs to a part of a peer's podCIDR.
func (a *agent) adviseInside(peers []noderoutes.Peer) {
	for _, p := range peers {
		if route := a.moreSpecific[p.PodCIDR]; route != "" && p.Reason == "" {
			a.advise(fmt.Sprintf("node %s %s", p.Name, p.PodCIDR), fmt.Errorf("a part of it has a route of another program: %s", route),
				"remove that route: it diverts packets to these pods from the node", false)
			a.nextSync = earlier(a.nextSync, time.Now().Add(a.times.conflictPause))
		}
	}
}

// withKeptCIDRs adds the CIDRs in node.json to those of pods, unless the configuration has clusterCIDRs. The routes to these pods are kept,
// so connections to them must not be masqueraded.
func (a *agent) withKeptCIDRs(cidrs []netip.Prefix) []netip.Prefix {
	file, before, err := nodefile.Read()
	if err != nil || file != nodefile.Path || len(a.config.ClusterCIDRs) > 0 {
		return cidrs
	}
	return noderoutes.MergeCIDRs(cidrs, before.ClusterCIDRs)
}

// planConfig converts the configuration for package noderoutes, with the subnets of this node's links.
func (a *agent) planConfig(n *kernel.NS) (noderoutes.Config, error) {
	c := a.config
	if !c.Routes {
		c.OffLink = noderoutes.OffLinkFabric
	}
	connected, err := n.AddressSubnets()
	return noderoutes.Config{Self: a.Node, OffLink: c.OffLink, AddressCIDRs: c.AddressCIDRs, ClusterCIDRs: c.ClusterCIDRs, MTU: c.MTU,
		VXLAN: c.VXLAN, Connected: connected}, err
}

// gateways returns the addresses of the peers and of this node, whose current routes Plan needs.
func gateways(self noderoutes.Self, peers []noderoutes.Peer) []netip.Addr {
	list := slices.Clone(self.Addresses)
	for _, p := range peers {
		for _, addr := range []netip.Addr{p.Gateway, p.Underlay} {
			if addr.IsValid() && p.State == "" {
				list = append(list, addr)
			}
		}
	}
	return list
}

// deletionsTrusted reports whether the agent may delete routes. A list without this node may come from the wrong cluster or an old backup,
// or the node will return. If more than half of the routes lead to nodes that the list lacks, they are deleted only if these are still
// missing after a minute.
func (a *agent) deletionsTrusted(r noderoutes.Result, selfGone bool) bool {
	now := time.Now()
	until := "the list has persisted for a minute"
	if !a.deletionsHeld {
		a.routesWhenHeld = r.Had
	}
	had := min(r.Had, a.routesWhenHeld) // not counting routes to new nodes, of which a wrong list may have many
	switch {
	case selfGone:
		a.suspectSince, until = time.Time{}, "the own Node object is there again"
	case 2*r.Unwanted <= had, !a.suspectSince.IsZero() && now.Sub(a.suspectSince) >= a.times.trustDelay:
		a.deletionsHeld, a.suspectSince = false, time.Time{}
		return true
	default:
		if a.suspectSince.IsZero() {
			a.suspectSince = now
		}
		a.nextSync = earlier(a.nextSync, a.suspectSince.Add(a.times.trustDelay))
	}
	if !a.deletionsHeld {
		a.log.Warn("the list of nodes is suspicious: no route is deleted until it has persisted for a minute", "routes", had,
			"unwanted", r.Unwanted, "ownNode", !selfGone)
	}
	a.deletionsHeld = true
	a.advise("nodes", fmt.Errorf("%d of %d routes have no node any more: they stay until %s", r.Unwanted, had, until),
		"check that the API server is that of this cluster", false)
	return false
}

// mostLogged is how many peers one step writes to the log.
const mostLogged = 10

// setPeers stores the state of the routes to the peers, and logs changes.
func (a *agent) setPeers(peers []noderoutes.Peer, r noderoutes.Result) {
	type key struct {
		name string
		cidr netip.Prefix
	}
	before := map[key]PeerStatus{}
	for _, p := range a.peers {
		before[key{p.Name, p.PodCIDR}] = p
	}
	a.peers = make([]PeerStatus, 0, len(peers))
	news := 0
	for _, p := range peers {
		do := remedyFor(p)
		if err := r.Failed[p.PodCIDR]; err != nil && p.Reason == "" {
			p.State, p.Reason = noderoutes.Failed, err.Error()
			a.routesFailed = true
		}
		if route, conflict := r.Conflicts[p.PodCIDR]; conflict && p.Reason == "" {
			p.State, p.Reason = noderoutes.Conflict, "a route of another program: "+route
			do = "remove the route, or add its protocol to adopt"
			a.nextSync = earlier(a.nextSync, time.Now().Add(a.times.conflictPause))
		}
		s := PeerStatus{Name: p.Name, PodCIDR: p.PodCIDR, Gateway: p.Gateway, State: p.State, Reason: p.Reason, elder: p.Elder, do: do}
		a.peers = append(a.peers, s)
		was, known := before[key{p.Name, p.PodCIDR}]
		if s.Reason == was.Reason && s.State == was.State || s.Reason == "" && !known {
			continue
		}
		if news++; news > mostLogged {
			continue
		}
		if s.Reason == "" {
			a.log.Info("a node is reached again", "node", s.Name, "podCIDR", s.PodCIDR, "state", s.State)
		} else {
			a.log.Warn("a node is not reached", "node", s.Name, "podCIDR", text(s.PodCIDR.IsValid(), s.PodCIDR), "state", s.State,
				"reason", s.Reason, "hint", "'podlace-node status' has the remedy")
		}
	}
	if news > mostLogged {
		a.log.Warn("more nodes have changed: podlace-node status lists all", "nodes", news-mostLogged)
	}
}

// remedyFor returns the remedy for a peer to which Plan refused a route, or "" if the general one for its state is enough.
func remedyFor(p noderoutes.Peer) string {
	if p.NoLink {
		return "set offLink to vxlan, or to fabric if the routers between the nodes have the pod routes"
	}
	return ""
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"maps"
	"os/exec"
)

// sidePod is Podlace's plugin that runs the whole chain in one process.
const sidePod = "podlace-pod"

const (
	podPlain  = "plain"
	podMapped = "one hostPort"
	podLimits = "hostPort, limits"

	// presentPods is the number of other pods on every node. A node's only hostPort pod also makes and removes tables.
	presentPods = 3
)

// shippedPod is a pod of the shipped configuration: dual stack, masquerade and hostPorts by nftables, and spoof protection.
type shippedPod struct {
	name    string
	port    int
	limited bool
}

func shippedPods() []shippedPod {
	return []shippedPod{{name: podPlain}, {name: podMapped, port: 18080}, {name: podLimits, port: 18080, limited: true}}
}

// shippedEntries returns the plugins of the shipped configuration. Spoof protection differs in the reference plugins.
func shippedEntries(side string) []pluginConf {
	number := map[string]int{sideOurs: 86, sidePod: 87, sideReference: 88}[side]
	subnets := [][]map[string]any{{{"subnet": fmt.Sprintf("10.%d.0.0/16", number)}}, {{"subnet": fmt.Sprintf("fd00:%d::/64", number)}}}
	main := pluginConf{
		"type": "bridge", "bridge": fmt.Sprint("br-shipped", number), "isGateway": true, "ipMasq": true, "hairpinMode": true,
		"ipam": map[string]any{"type": "host-local", "ranges": subnets,
			"routes": []map[string]any{{"dst": "0.0.0.0/0"}, {"dst": "::/0"}}},
	}
	ports := pluginConf{"type": "portmap", "backend": "nftables", "snat": true, "capabilities": map[string]bool{"portMappings": true}}
	switch side {
	case sideReference:
		main["macspoofchk"], main["ipMasqBackend"] = true, "nftables"
	case sidePod:
		main["type"], main["antiSpoof"] = sidePod, true
		main["capabilities"] = map[string]bool{"portMappings": true, "bandwidth": true}
		main["portmap"] = map[string]any{"backend": "nftables", "snat": true}
		return []pluginConf{main}
	default:
		main["antiSpoof"] = true
	}
	return []pluginConf{main, ports, bandwidthPlugin()}
}

func (p shippedPod) capabilities() map[string]any {
	args := map[string]any{}
	if p.port != 0 {
		args["portMappings"] = []map[string]any{{"hostPort": p.port, "containerPort": podPort, "protocol": "tcp"}}
	}
	if p.limited {
		args["bandwidth"] = annotatedLimits(podRate)
	}
	return args
}

// shippedChains returns the chains of both forms and of the reference plugins, each with other pods. Both forms share a node, because a
// node's records are in one folder.
func (n nodes) shippedChains(o options) (map[string]*chain, error) {
	chains := map[string]*chain{}
	for number, side := range []string{sideOurs, sidePod, sideReference} {
		folder, node := o.plugins, "node-shipped"
		if side == sideReference {
			folder, node = o.reference, "node-shipped-reference"
		}
		c, err := n.chainOf("shipped-"+side, node, pluginSet{side, folder}, shippedEntries(side)...)
		if err != nil {
			return nil, err
		}
		for i := range presentPods {
			other, err := n.neighbourChain(c, i)
			if err == nil {
				other.args = shippedPod{port: 19000 + 10*number + i}.capabilities()
				err = other.run(verbAdd, executeProcess)
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", side, err)
			}
		}
		chains[side] = c
	}
	return chains, nil
}

// measureShipped measures ADD, CHECK and DEL of a pod in both forms, and with the reference plugins.
func (r *report) measureShipped(o options, n nodes) {
	if _, err := exec.LookPath("nft"); err != nil {
		r.skip("shipped configuration: nft is not installed, which the reference plugins need")
		return
	}
	chains, err := n.shippedChains(o)
	if err != nil {
		r.fail("shipped configuration", err)
		return
	}
	for _, p := range shippedPods() {
		var entries []*contenderEntry
		var errs []error
		for _, side := range []string{sideOurs, sidePod, sideReference} {
			c := *chains[side]
			c.args = p.capabilities()
			entries = append(entries, newEntry(side, &c))
		}
		runRounds(entries, o.rounds)
		for _, e := range entries {
			errs = append(errs, e.err)
		}
		if err := errors.Join(errs...); err != nil {
			r.fail(p.name, err)
			continue
		}
		for _, verb := range []string{verbAdd, verbCheck, verbDel} {
			r.addChain(p.name, verb, entries)
		}
		r.addProcesses(p.name, "nftables", entries)
	}
	r.measureCrowds(chains, o, n)
}

// measureCrowds attaches and detaches many pods with a hostPort and limits at once.
func (r *report) measureCrowds(chains map[string]*chain, o options, n nodes) {
	count := o.scaledSize(parallelCount)
	var crowds []*podCrowd
	for _, side := range []string{sideOurs, sidePod, sideReference} {
		c := &podCrowd{side: side}
		for i := range count {
			next, err := n.neighbourChain(chains[side], presentPods+i)
			if err != nil {
				r.fail("parallel", err)
				return
			}
			next.args = shippedPod{port: 20000 + i, limited: true}.capabilities()
			c.chains = append(c.chains, next)
		}
		crowds = append(crowds, c)
	}
	for range max(1, min(parallelRepeats, o.rounds/5)) {
		for _, c := range crowds {
			if c.err == nil {
				c.err = c.attachAndDetachAll()
			}
		}
	}
	add, del := map[string]figure{}, map[string]figure{}
	for _, c := range crowds {
		if c.err != nil {
			r.fail("parallel, "+c.side, c.err)
			continue
		}
		add[c.side], del[c.side] = figure{Value: p50(c.add)}, figure{Value: p50(c.del)}
	}
	r.addCrowd(fmt.Sprintf("%d ADDs at once", count), 0.18, add)
	r.addCrowd(fmt.Sprintf("%d DELs at once", count), 0.10, del)
}

// addCrowd adds a row for each form. Only podlace-pod has a bar.
func (r *report) addCrowd(what string, bar float64, figures map[string]figure) {
	r.addLoad(what+", chain", 0, figures)
	one := maps.Clone(figures)
	one[sideOurs] = one[sidePod]
	r.addLoad(what+", podlace-pod", bar, one)
}

// measureShippedGrowth measures podlace-pod beside one pod and then beside many, each with a hostPort and limits, all on one node because a
// node's records are in one folder.
func (r *report) measureShippedGrowth(o options, n nodes) {
	count := o.scaledSize(podCount)
	limited := func(i int) map[string]any { return shippedPod{port: 20000 + i, limited: true}.capabilities() }
	c, err := n.chainOf("growth", "node-growth", pluginSet{sidePod, o.plugins}, shippedEntries(sidePod)...)
	var first *chain
	if err == nil {
		first, err = n.neighbourChain(c, count)
	}
	if err == nil {
		c.args, first.args = limited(count+1), limited(count)
		err = first.run(verbAdd, executeProcess)
	}
	entries := map[string]*contenderEntry{}
	for _, what := range []string{besideNone, besideMany} {
		if err == nil && what == besideMany {
			_, err = n.fillPods(c, count, limited)
		}
		if err != nil {
			r.fail(sidePod+" beside many pods", err)
			return
		}
		name := entryName(sideOurs, what)
		entries[name] = newEntry(name, c)
		runRounds([]*contenderEntry{entries[name]}, o.rounds)
	}
	for _, verb := range []string{verbAdd, verbCheck, verbDel} {
		what := fmt.Sprintf("%s %s, %s pods with a hostPort and limits", sidePod, verb, thousands(count))
		r.addGrowth(what, 0, r.compareMedians(entries, verb))
	}
}

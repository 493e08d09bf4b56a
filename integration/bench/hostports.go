// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/podlace/podlace/pkg/kernel"
)

const (
	portsBridge = "br-ports"
	portsRounds = 15
	manyPorts   = 200
	otherPorts  = 5000
	portsOfPod  = 50 // the reference fails with several hundred ports in one call
)

// portmapAlone returns the configuration of portmap with a prevResult that describes a pod, so that no main plugin is needed.
func portmapAlone(backend, address string, first, count int) pluginConf {
	var ports []map[string]any
	for i := range count {
		ports = append(ports, map[string]any{"hostPort": first + i, "containerPort": 80, "protocol": "tcp"})
	}
	return pluginConf{"type": "portmap", "backend": backend, "snat": true, "runtimeConfig": map[string]any{"portMappings": ports},
		"prevResult": json.RawMessage(fmt.Sprintf(`{"cniVersion":%q,"interfaces":[{"name":%q,"sandbox":"/x"}],"ips":[{"address":"%s/16","interface":0}]}`, cniVersion, podInterface, address))}
}

// portsNode creates the node's bridge.
func portsNode(c *chain) error {
	return c.node.Do(func() error {
		host, err := kernel.Host()
		if err != nil {
			return err
		}
		defer host.Close()
		if _, ok, err := host.Link(portsBridge); ok || err != nil {
			return err
		}
		if err := host.AddBridge(portsBridge, nil, 0, false, false); err != nil {
			return err
		}
		link, _, err := host.Link(portsBridge)
		return errors.Join(err, host.AddAddress(link, netip.MustParsePrefix("10.98.0.1/16"), false), host.SetUp(link))
	})
}

// measurePorts measures portmap alone: with one and with many ports, with and without other pods' hostPorts.
func (r *report) measurePorts(o options, n nodes) {
	count := o.scaledSize(otherPorts)
	entries := map[string]*contenderEntry{}
	var all []*contenderEntry
	const backend = "nftables"
	add := func(side pluginSet, what, node string, first, ports int) bool {
		name := entryName(side.name, what)
		c, err := n.chainOf("ports-"+strings.ReplaceAll(name, " ", "-"), "ports-node-"+side.name+"-"+node, side,
			portmapAlone(backend, "10.98.0.5", first, ports))
		if err == nil {
			err = portsNode(c)
		}
		if err == nil && node == besideMany {
			err = n.fillPorts(c, backend, otherPods{count, portsOfPod})
		}
		if err != nil {
			r.fail("hostPorts, "+name, err)
			return false
		}
		entries[name] = newEntry(name, c)
		all = append(all, entries[name])
		return true
	}
	for _, side := range o.bothSides() {
		ok := add(side, besideNone, besideNone, 8080, 1) && add(side, besideMany, besideMany, 8080, 1) &&
			add(side, "nothing", "nothing", 0, 0) && add(side, "200 ports", "200", 9000, manyPorts)
		if !ok {
			return
		}
	}
	runRounds(all, min(o.rounds, portsRounds))
	r.addLoad("portmap ADD of one port, over no port", 0, additionalTime(entries, besideNone, verbAdd))
	r.addLoad("portmap DEL of one port, over no port", 0, additionalTime(entries, besideNone, verbDel))
	r.addLoad(fmt.Sprintf("portmap ADD of %d ports, over no port", manyPorts), 0, additionalTime(entries, "200 ports", verbAdd))
	for _, verb := range []string{verbAdd, verbDel} {
		r.addGrowth(fmt.Sprintf("portmap %s, %s hostPorts of other pods", verb, thousands(count)), growthBar, r.compareMedians(entries, verb))
	}
}

func (n nodes) fillPorts(like *chain, backend string, beside otherPods) error {
	for i := 0; i < beside.count; i += beside.each {
		c, pod := *like, i/beside.each
		c.id = containerID(fmt.Sprint(like.network, i))
		c.plugins = []pluginConf{portmapAlone(backend, fmt.Sprintf("10.98.%d.%d", 1+pod/250, 1+pod%250), 20000+i,
			min(beside.each, beside.count-i))}
		if err := c.run(verbAdd, executeProcess); err != nil {
			return err
		}
	}
	return nil
}

// additionalTime returns by how many milliseconds a verb takes longer with ports than without.
func additionalTime(entries map[string]*contenderEntry, what, verb string) map[string]figure {
	sides := map[string]figure{}
	for _, side := range []string{sideOurs, sideReference} {
		e, nothing := entries[entryName(side, what)], entries[entryName(side, "nothing")]
		if e.err == nil && nothing.err == nil {
			sides[side] = figure{Value: max(0, p50(e.samples[verb].chain)-p50(nothing.samples[verb].chain))}
		}
	}
	return sides
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
)

const (
	podCount    = 1000
	podSubnet   = "10.97.0.0/16"
	fillWorkers = 4

	statusCalls = 100
	verbStatus  = "STATUS"

	lateVersion = "1.1.0" // the first version with STATUS and GC
)

func masqueradedBridge(subnets ...string) pluginConf {
	var ranges [][]map[string]any
	for _, subnet := range subnets {
		ranges = append(ranges, []map[string]any{{"subnet": subnet}})
	}
	return pluginConf{
		"type": "bridge", "bridge": "br-many", "isDefaultGateway": true, "ipMasq": true, "ipMasqBackend": "nftables",
		"ipam": map[string]any{"type": "host-local", "ranges": ranges},
	}
}

// measurePods measures the plugins on a node with one pod and with many. Each plugin set attaches its own, so that the node has its rules,
// leases and records.
func (r *report) measurePods(o options, n nodes) {
	count := o.scaledSize(podCount)
	entries := map[string]*contenderEntry{}
	var all []*contenderEntry
	chains := map[string]*chain{} // Podlace's chains
	sides, missing := o.usableSets(nftables())
	r.skip(missing...)
	if len(missing) > 0 {
		return
	}
	for _, side := range sides {
		for _, what := range []string{besideNone, besideMany} {
			name := "pods-" + side.name + "-" + what
			c, err := n.chainOf(name, "node-"+name, side, masqueradedBridge(podSubnet))
			if err == nil && what == besideMany {
				_, err = n.fillPods(c, count, nil)
			}
			if err != nil {
				r.fail("pods, "+side.name, err)
				return
			}
			if side.name == sideOurs {
				chains[what] = c
			}
			name = entryName(side.name, what)
			entries[name] = newEntry(name, c)
			all = append(all, entries[name])
		}
	}
	runRounds(all, o.rounds)
	r.addGrowth(fmt.Sprintf("bridge ADD, %s other pods", thousands(count)), 0, r.compareMedians(entries, verbAdd))
	for _, verb := range []string{verbCheck, verbDel} {
		r.addGrowth(fmt.Sprintf("bridge %s, %s other pods", verb, thousands(count)), 0, r.compareMedians(entries, verb))
	}
	r.measureAttach(chains, o.rounds, count)
	r.measureStatus(chains[besideMany], fmt.Sprintf("STATUS p99, %s pods", thousands(count)))
}

// measureAttach measures how long the kernel takes to create a veth pair and a bridge port, for which it visits all ports of the bridge.
// This is a part of the time of ADD.
func (r *report) measureAttach(chains map[string]*chain, rounds, ports int) {
	var f figure
	for what, into := range map[string]*float64{besideNone: &f.Base, besideMany: &f.Value} {
		var samples []time.Duration
		c := chains[what]
		err := c.node.Do(func() error {
			host, err := kernel.Host()
			if err != nil {
				return err
			}
			defer host.Close()
			bridge, _, err := host.Link(c.plugins[0]["bridge"].(string))
			for i := 0; err == nil && i < rounds; i++ {
				start := time.Now()
				_, err = host.AddVeth(kernel.Veth{Host: "attach0", Pod: "attach1", Master: bridge.Index})
				samples = append(samples, time.Since(start))
				err = errors.Join(err, host.DelLink("attach0"))
			}
			return err
		})
		if err != nil {
			r.fail("attach", err)
			return
		}
		*into = p50(samples)
	}
	r.addGrowth(fmt.Sprintf("of ADD, the kernel alone: a veth pair into a bridge of %s ports", thousands(ports)), 0,
		map[string]figure{sideOurs: f})
}

// fillPods attaches pods to the network of the chain `like`, each with its own namespace. args returns the capabilities of each pod; nil
// means those of `like`.
func (n nodes) fillPods(like *chain, count int, args func(i int) map[string]any) (pods []*chain, made error) {
	chains := make(chan *chain)
	errs := make(chan error, fillWorkers)
	var group sync.WaitGroup
	for range fillWorkers {
		group.Go(func() {
			var err error
			for c := range chains {
				if err == nil {
					err = c.run(verbAdd, executeProcess)
				}
			}
			errs <- err
		})
	}
	for i := 0; i < count && made == nil; i++ {
		var c *chain
		if c, made = n.neighbourChain(like, i); made == nil {
			if args != nil {
				c.args = args(i)
			}
			pods = append(pods, c)
			chains <- c
		}
	}
	close(chains)
	group.Wait()
	for range fillWorkers {
		made = errors.Join(made, <-errs)
	}
	return pods, made
}

// neighbourChain returns a chain for another pod of the same network and node.
func (n nodes) neighbourChain(like *chain, i int) (*chain, error) {
	name := fmt.Sprintf("%s-%d", like.network, i)
	pod, err := n.open(name)
	if err != nil {
		return nil, err
	}
	c := *like
	c.pod, c.id = pod, containerID(name)
	return &c, nil
}

// measureStatus measures STATUS of the chain's first plugin.
func (r *report) measureStatus(like *chain, what string) {
	c := *like
	c.plugins = []pluginConf{c.plugins[0].withKey("cniVersion", lateVersion)}
	var samples []time.Duration
	for range statusCalls {
		err := c.run(verbStatus, func(inv invocation) ([]byte, error) {
			out, took, err := inv.runTimed()
			samples = append(samples, took.wall)
			return out, err
		})
		if err != nil {
			r.fail("STATUS", err)
			return
		}
	}
	r.addLoad(what, 0, map[string]figure{sideOurs: {Value: milliseconds(percentile(samples, 99))}})
}

func (p pluginConf) withKey(key string, value any) pluginConf {
	out := pluginConf{key: value}
	for k, v := range p {
		if k != key {
			out[k] = v
		}
	}
	return out
}

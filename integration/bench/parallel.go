// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"
)

const (
	parallelCount   = 200
	parallelRepeats = 3
	parallelSubnet  = "10.95.0.0/16"
)

// The type podCrowd is a set of pods that one plugin set attaches and detaches in parallel.
type podCrowd struct {
	side   string
	chains []*chain
	add    []time.Duration
	del    []time.Duration
	err    error
}

// measureParallel measures parallel ADDs of many pods, and then parallel DELs of these pods.
func (r *report) measureParallel(o options, n nodes) {
	count, s := o.scaledSize(parallelCount), nftables()
	sides, missing := o.usableSets(s)
	r.skip(missing...)
	var crowds []*podCrowd
	for _, side := range sides {
		c, err := n.crowd(side, count)
		if err != nil {
			r.fail("parallel", err)
			return
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
		switch {
		case c.err == nil:
			add[c.side], del[c.side] = figure{Value: p50(c.add)}, figure{Value: p50(c.del)}
		case c.side == sideOurs:
			r.fail("parallel", c.err)
		default:
			r.skip(fmt.Sprintf("parallel, %s: %v", c.side, c.err)) // a failure of the reference is only reported
		}
	}
	r.addLoad(fmt.Sprintf("%d ADDs at once (bridge, ipMasq)", count), parallelBar, add)
	r.addLoad(fmt.Sprintf("%d DELs at once", count), 0, del)
}

func (n nodes) crowd(side pluginSet, count int) (*podCrowd, error) {
	name := "parallel-" + side.name
	first, err := n.chainOf(name, "node-"+name, side, masqueradedBridge(parallelSubnet))
	if err != nil {
		return nil, err
	}
	c := &podCrowd{side: side.name}
	for i := range count {
		next, err := n.neighbourChain(first, i)
		if err != nil {
			return nil, err
		}
		c.chains = append(c.chains, next)
	}
	return c, nil
}

// attachAndDetachAll attaches all pods, checks that their addresses differ, and detaches all pods.
func (c *podCrowd) attachAndDetachAll() error {
	took, err := c.all(verbAdd)
	if err != nil {
		return err
	}
	c.add = append(c.add, took)
	if err := c.distinct(); err != nil {
		return err
	}
	if took, err = c.all(verbDel); err != nil {
		return err
	}
	c.del = append(c.del, took)
	return c.checkNoLeases()
}

func (c *podCrowd) all(verb string) (time.Duration, error) {
	errs := make([]error, len(c.chains))
	var group sync.WaitGroup
	start := time.Now()
	for i, each := range c.chains {
		group.Go(func() { errs[i] = each.run(verb, executeProcess) })
	}
	group.Wait()
	return time.Since(start), errors.Join(errs...)
}

func (c *podCrowd) distinct() error {
	seen := map[netip.Addr]string{}
	for _, each := range c.chains {
		addr, _, err := each.podAddress()
		if err != nil {
			return err
		}
		if other, ok := seen[addr]; ok {
			return fmt.Errorf("%s was given to %s and to %s", addr, other, each.pod.Name)
		}
		seen[addr] = each.pod.Name
	}
	return nil
}

// checkNoLeases checks that no lease remains.
func (c *podCrowd) checkNoLeases() error {
	left, err := leaseFiles(filepath.Join(resultsFolder, c.chains[0].network))
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("%d leases are left after DEL", len(left))
	}
	return err
}

// leaseFiles returns the container ID and interface of each address in a lease folder.
func leaseFiles(folder string) (map[netip.Addr]string, error) {
	files, err := os.ReadDir(folder)
	if err != nil {
		return nil, fmt.Errorf("list leases: %w", err)
	}
	leases := map[netip.Addr]string{}
	for _, file := range files {
		addr, err := netip.ParseAddr(file.Name())
		if err != nil {
			continue // lock and last_reserved_ip
		}
		content, err := os.ReadFile(filepath.Join(folder, file.Name()))
		if err != nil {
			return nil, fmt.Errorf("read lease: %w", err)
		}
		leases[addr] = string(content)
	}
	return leases, nil
}

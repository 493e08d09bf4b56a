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
	parallelCount   = 50
	parallelRepeats = 3
)

// podCrowd is a set of pods that are attached and detached in parallel.
type podCrowd struct {
	side   string
	chains []*chain
	add    []time.Duration
	del    []time.Duration
	err    error
}

// attachAndDetachAll also checks that the addresses of all pods differ.
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

// checkNoLeases checks that only the leases of the node's other pods remain, two for each.
func (c *podCrowd) checkNoLeases() error {
	left, err := leaseFiles(filepath.Join(resultsFolder, c.chains[0].network))
	if err == nil && len(left) != 2*presentPods {
		err = fmt.Errorf("%d leases are left after DEL, want %d", len(left), 2*presentPods)
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

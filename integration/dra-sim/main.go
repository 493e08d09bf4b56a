// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"time"
)

// simOptions contains the parameters of the simulation.
type simOptions struct {
	nodes, rounds int
	vfs, wants    []int // VFs of a node, VFs of a claim
	full          float64
	seed          uint64
}

func main() {
	o, err := parseFlags(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err == nil {
		err = runSimulation(context.Background(), o, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "dra-sim:", err)
		os.Exit(1)
	}
}

func parseFlags(args []string, stderr io.Writer) (simOptions, error) {
	o := simOptions{wants: []int{1, 2, 4}}
	f := flag.NewFlagSet("dra-sim", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.IntVar(&o.nodes, "nodes", 5000, "nodes of the cluster")
	f.IntVar(&o.rounds, "rounds", 300, "allocations that are measured for each row")
	f.Float64Var(&o.full, "full", 0.5, "share of the VFs that claims have already")
	f.Uint64Var(&o.seed, "seed", 1, "which VFs these are")
	large := f.Bool("large", false, "256 VFs a node as well, which takes several GB of memory")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	o.vfs = []int{16, 64}
	if *large {
		o.vfs = append(o.vfs, 256)
	}
	if o.nodes < 1 || o.rounds < 1 || o.full < 0 || o.full >= 1 {
		return o, errors.New("want at least one node and one round, and a share below 1")
	}
	return o, nil
}

// allocationTimes are the times of all allocations of one row.
type allocationTimes struct {
	times  []time.Duration // for one node
	cycles []time.Duration // setup of the allocator, once for each pod
	failed int
}

// timeQuantile returns a quantile of the times; for example, q = 0.5 selects the median.
func timeQuantile(times []time.Duration, q float64) time.Duration {
	times = slices.Sorted(slices.Values(times))
	return times[min(len(times)-1, int(q*float64(len(times))))]
}

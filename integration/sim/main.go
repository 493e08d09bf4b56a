// SPDX-License-Identifier: Apache-2.0

// Command sim simulates a node on which pods with VFs start and end, and compares ways of choosing VFs: the kubelet's random choice and the
// policies of the device plugin. The kubelet is that of integration/kubeletnode, and VFs are chosen by pkg/daemon/pool, the device plugin's
// code.
//
// Pods arrive at random times (Poisson), request 1, 2, 4 or 8 VFs (60, 25, 10 and 5 %) in one container, and have exponentially distributed
// lifetimes. A pod without enough free VFs is dropped. In a run, which starts from one seed, all methods get the same pods at the same
// times. The output has the means of the runs with their 95 % confidence intervals (Student's t), and is the same for the same flags.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/cli/kubelet"
)

type options struct {
	seeds, pods int
	load        float64
	topologies  []topology
	policies    []kubelet.Policy
	allocators  []choiceMethod
	cpus        int
}

func main() {
	o, err := parse(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sim:", err)
		os.Exit(2)
	}
	r, err := runAll(o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "sim:", err)
		os.Exit(1)
	}
	fmt.Print(r.markdown())
}

func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	flags := flag.NewFlagSet("sim", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.IntVar(&o.seeds, "seeds", 10, "`runs` of each row, at least 2")
	flags.IntVar(&o.pods, "pods", 5000, "`pods` of each run; the first tenth only fills the node")
	flags.Float64Var(&o.load, "load", 85, "offered load in `percent` of the VFs")
	flags.IntVar(&o.cpus, "cpus", 0, fmt.Sprintf("`CPUs` of each NUMA node, of which pods want %d for each VF; 0 for no static CPU policy",
		cpusPerVF))
	ports := flags.Int("ports", 1, "PFs of each card")
	topologies := flags.String("topology", "2x2x16,4x2x16", "comma-separated machines: NUMA `nodes`xPFs of eachxVFs of each")
	policies := flags.String("policies", "none,best-effort,restricted,single-numa-node", "comma-separated `policies` of the Topology Manager")
	allocators := flags.String("allocators", strings.Join(allocatorNames(), ","), "comma-separated `choices`")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("unknown argument %q", flags.Arg(0))
	}
	if o.seeds < 2 || o.pods < 100 || o.load <= 0 || o.cpus < 0 || o.cpus > 0 && o.cpus < cpusPerVF*largest {
		return o, fmt.Errorf("want -seeds 2 and more, -pods 100 and more, -load above 0, -cpus 0 or %d and more", cpusPerVF*largest)
	}
	for _, s := range strings.Split(*topologies, ",") {
		t, err := parseTopology(s, *ports)
		if err != nil {
			return o, err
		}
		o.topologies = append(o.topologies, t)
	}
	for _, s := range strings.Split(*policies, ",") {
		p := kubelet.Policy(s)
		if !slices.Contains([]kubelet.Policy{kubelet.None, kubelet.BestEffort, kubelet.Restricted, kubelet.SingleNUMA}, p) {
			return o, fmt.Errorf("unknown policy %q", s)
		}
		o.policies = append(o.policies, p)
	}
	for _, s := range strings.Split(*allocators, ",") {
		if !slices.Contains(allocatorNames(), s) {
			return o, fmt.Errorf("unknown choice %q", s)
		}
		o.allocators = append(o.allocators, choiceMethod(s))
	}
	return o, nil
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/cli/kubelet"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
)

const cpuResource = "cpu"

// requestFlags describes a container's request.
type requestFlags struct {
	count  int
	cpus   int
	with   []string // RESOURCE or RESOURCE=COUNT
	policy string
}

func (f *requestFlags) add(cmd *cobra.Command) {
	cmd.Flags().IntVar(&f.count, "count", 0, "number of devices of the resource that a container wants")
	cmd.Flags().IntVar(&f.cpus, "cpus", 0, "number of exclusive CPUs that the container wants besides")
	cmd.Flags().StringSliceVar(&f.with, "with", nil, "further resource of the container, as RESOURCE or RESOURCE=COUNT")
	addChoice(cmd, &f.policy, "policy", "", "only this policy", policies()...)
}

// demand is a resource that a container requests, with the count and its devices or CPUs.
type demand struct {
	name  string
	count int
	*kubelet.Devices
}

// idle returns the demand on a node without pods and faults. CPUs without health are reserved for the system, and never free.
func (d demand) idle() demand {
	devices := kubelet.NewDevices(d.Machine, d.Near)
	if d.name == cpuResource {
		devices.Healthy = d.Healthy
	}
	d.Devices = devices
	return d
}

// policies returns the Topology Manager's policies, the most tolerant first.
func policies() []string {
	return []string{string(kubelet.None), string(kubelet.BestEffort), string(kubelet.Restricted), string(kubelet.SingleNUMA)}
}

// check returns an error for flag values that no real request can have.
func (f requestFlags) check(given func(flag string) bool) error {
	switch {
	case given("count") && f.count < 1:
		return fmt.Errorf("--count %d: want at least 1", f.count)
	case given("cpus") && f.cpus < 1:
		return fmt.Errorf("--cpus %d: want at least 1", f.cpus)
	case !given("count") && (given("cpus") || given("with") || given("policy")):
		return errors.New("--cpus, --with and --policy describe a request for devices: --count is missing")
	}
	return nil
}

// parseWith parses RESOURCE or RESOURCE=COUNT.
func parseWith(text string) (demand, error) {
	resource, number, counted := strings.Cut(text, "=")
	if !counted {
		number = "1"
	}
	count, err := strconv.Atoi(number)
	if err != nil || count < 1 || !strings.Contains(resource, "/") {
		return demand{}, fmt.Errorf("--with %q: want a resource such as example.com/gpu or example.com/gpu=2", text)
	}
	return demand{name: resource, count: count}, nil
}

// explainRequest prints whether a container could get the resources, and how the Topology Manager merges the hints.
func (f *sriovFlags) explainRequest(ctx context.Context, n *sriovNode, stdout io.Writer, resource string) error {
	machine, err := n.machine()
	if err != nil {
		return err
	}
	demands, err := f.demands(ctx, n, machine, resource)
	if err != nil {
		return err
	}
	wanted := policies()
	if f.request.policy != "" {
		wanted = []string{f.request.policy}
	}
	a, err := newRequestAnswer(machine, demands, wanted)
	if err != nil {
		return err
	}
	err = printAs(f.output, stdout, a, func() { a.print(stdout) })
	if err == nil && !slices.ContainsFunc(a.Policies, func(p policyAnswer) bool { return p.Admitted }) {
		return exitError(exitDiffers)
	}
	return err
}

// machine returns the machine's NUMA nodes.
func (n *sriovNode) machine() (machine kubelet.Mask, err error) {
	for _, node := range n.snapshot.Nodes {
		if node.ID < 0 || node.ID >= 64 || machine.Count() == maxNodes {
			return 0, fmt.Errorf("NUMA node %d: hints are merged for at most %d NUMA nodes, with IDs below 64", node.ID, maxNodes)
		}
		machine |= 1 << node.ID
	}
	return max(machine, 1), nil
}

// maxNodes limits the NUMA nodes, because all their combinations are tried. The kubelet's default limit is 8.
const maxNodes = 16

// demands returns all resources that the container requests, with their devices or CPUs.
func (f *sriovFlags) demands(ctx context.Context, n *sriovNode, machine kubelet.Mask, resource string) (demands []demand, err error) {
	if resource == "" && len(n.pools) == 1 {
		resource = n.pools[0].Name
	}
	demands = []demand{{name: resource, count: f.request.count}}
	if f.request.cpus > 0 {
		demands = append(demands, demand{name: cpuResource, count: f.request.cpus})
	}
	for _, text := range f.request.with {
		d, err := parseWith(text)
		if err == nil && slices.ContainsFunc(demands, func(o demand) bool { return o.name == d.name }) {
			err = fmt.Errorf("--with %s: the request has this resource already", plain(d.name))
		}
		if err != nil {
			return nil, err
		}
		demands = append(demands, d)
	}
	for i := range demands {
		d := &demands[i]
		if i == 0 || slices.ContainsFunc(n.pools, func(p pool.Pool) bool { return p.Name == d.name }) {
			d.Devices, err = n.poolDevices(machine, d.name)
		} else {
			d.Devices, err = f.otherDevices(ctx, n, machine, d.name)
		}
		if err != nil {
			return nil, err
		}
	}
	return demands, nil
}

// poolDevices returns the devices of a resource in this node's configuration.
func (n *sriovNode) poolDevices(machine kubelet.Mask, resource string) (*kubelet.Devices, error) {
	var names []string
	for _, p := range n.pools {
		names = append(names, p.Name)
	}
	i := slices.Index(names, resource)
	switch {
	case i < 0:
		return nil, fmt.Errorf("--count needs a resource of this node, one of %s", strings.Join(names, ", "))
	case n.pluginErr != nil:
		return nil, fmt.Errorf("the device plugin did not say which devices are free: %w", n.pluginErr)
	}
	devices := n.pools[i].Devices
	return newDevices(machine, len(devices), func(i int) (near []int, used, healthy bool) {
		address := devices[i].Address.String()
		_, used = n.held[address]
		return devices[i].Topology, used, n.faults[address] == ""
	}), nil
}

// otherDevices returns CPUs, or devices of another device plugin.
func (f *sriovFlags) otherDevices(ctx context.Context, n *sriovNode, machine kubelet.Mask, resource string) (*kubelet.Devices, error) {
	answer, err := askPlugin(ctx, f.socket, poddevices.Question{Node: true})
	switch {
	case err != nil:
		return nil, fmt.Errorf("the kubelet did not say which %s it can assign: %w", plain(resource), err)
	case resource == cpuResource:
		return n.cpus(answer.Node, machine)
	}
	return foreignDevices(answer.Node, machine, resource)
}

// cpus returns the node's CPUs. They have topology hints only if the CPU manager's policy is static.
func (n *sriovNode) cpus(of poddevices.Node, machine kubelet.Mask) (*kubelet.Devices, error) {
	if len(of.CPUs) == 0 {
		return nil, errors.New("--cpus: the kubelet has no exclusive CPUs, because its cpuManagerPolicy is not static: omit --cpus")
	}
	var all []int64
	var nodes []int
	for _, node := range n.snapshot.Nodes {
		for _, cpu := range node.CPUList() {
			all, nodes = append(all, int64(cpu)), append(nodes, node.ID)
		}
	}
	return newDevices(machine, len(all), func(i int) (near []int, used, healthy bool) {
		return nodes[i : i+1], slices.Contains(of.TakenCPUs, all[i]), slices.Contains(of.CPUs, all[i])
	}), nil
}

// foreignDevices returns the devices of another device plugin, of which the kubelet lists only the healthy ones.
func foreignDevices(n poddevices.Node, machine kubelet.Mask, resource string) (*kubelet.Devices, error) {
	devices := slices.DeleteFunc(slices.Clone(n.Devices), func(d poddevices.Assignable) bool { return d.Resource != resource })
	if len(devices) == 0 {
		return nil, fmt.Errorf("--with %s: neither the configuration nor the kubelet has devices of this resource", plain(resource))
	}
	of := func(i int) (near []int, used, healthy bool) { return devices[i].NUMA, devices[i].Taken, true }
	return newDevices(machine, len(devices), of), nil
}

// newDevices returns n devices. For each, a function returns its NUMA nodes, if they are known, and whether it is used and healthy.
func newDevices(machine kubelet.Mask, n int, of func(i int) (near []int, used, healthy bool)) *kubelet.Devices {
	devices := kubelet.NewDevices(machine, make([]kubelet.Mask, n))
	for i := range n {
		var near []int
		near, devices.Used[i], devices.Healthy[i] = of(i)
		for _, node := range near {
			if node != pci.Unknown {
				devices.Near[i] |= 1 << node
			}
		}
	}
	return devices
}

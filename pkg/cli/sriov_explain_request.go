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
	"github.com/podlace/podlace/pkg/podresources"
)

// cpuResource is the name of the CPU resource in a container's specification.
const cpuResource = "cpu"

// requestFlags holds the flags that describe a container's request.
type requestFlags struct {
	count      int
	cpus       int
	with       []string // RESOURCE or RESOURCE=COUNT
	policy     string
	kubeletDir string
}

// add() adds the flags with which the user describes a container's request.
func (f *requestFlags) add(cmd *cobra.Command) {
	cmd.Flags().IntVar(&f.count, "count", 0, "number of devices of the resource that a container wants")
	cmd.Flags().IntVar(&f.cpus, "cpus", 0, "number of exclusive CPUs that the container wants besides")
	cmd.Flags().StringSliceVar(&f.with, "with", nil, "further resource of the container, as RESOURCE or RESOURCE=COUNT")
	addChoice(cmd, &f.policy, "policy", "", "only this policy", policies()...)
	cmd.Flags().StringVar(&f.kubeletDir, "kubelet-dir", "/var/lib/kubelet", "folder of the kubelet, which knows CPUs and other resources")
}

// A demand is a resource that a container requests, with the requested count, and with the devices or CPUs of this resource.
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

// policies() returns the policies of the Topology Manager. The policies are sorted: the most tolerant policy is first.
func policies() []string {
	return []string{string(kubelet.None), string(kubelet.BestEffort), string(kubelet.Restricted), string(kubelet.SingleNUMA)}
}

// check() returns an error for flag values that no real request can have.
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

// parseWith parses an argument of the form RESOURCE or RESOURCE=COUNT.
func parseWith(text string) (resource string, count int, err error) {
	resource, number, counted := strings.Cut(text, "=")
	if count = 1; counted {
		count, err = strconv.Atoi(number)
	}
	if err != nil || count < 1 || !strings.Contains(resource, "/") {
		return "", 0, fmt.Errorf("--with %q: want a resource such as example.com/gpu or example.com/gpu=2", text)
	}
	return resource, count, nil
}

// explainRequest prints whether a container could get the requested resources, and how the Topology Manager merges the hints.
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
	if f.output == outputJSON {
		err = printJSON(stdout, a)
	} else {
		err = a.print(stdout)
	}
	if err == nil && !slices.ContainsFunc(a.Policies, func(p policyAnswer) bool { return p.Admitted }) {
		return exitError(exitDiffers)
	}
	return err
}

// machine() returns the set of the machine's NUMA nodes.
func (n *sriovNode) machine() (machine kubelet.Mask, err error) {
	for _, node := range n.snapshot.Nodes {
		if node.ID < 0 || node.ID >= 64 || machine.Count() == maxNodes {
			return 0, fmt.Errorf("NUMA node %d: hints are merged for at most %d NUMA nodes, with IDs below 64", node.ID, maxNodes)
		}
		machine |= 1 << node.ID
	}
	return max(machine, 1), nil
}

// maxNodes is the maximum number of NUMA nodes, because the command tries all combinations of NUMA nodes. The kubelet's default limit is 8
// NUMA nodes.
const maxNodes = 16

// demands() returns all resources that the container requests, each with its devices or CPUs.
func (f *sriovFlags) demands(ctx context.Context, n *sriovNode, machine kubelet.Mask, resource string) ([]demand, error) {
	if resource == "" && len(n.pools) == 1 {
		resource = n.pools[0].Name
	}
	own, err := n.poolDemand(machine, resource, f.request.count)
	if err != nil {
		return nil, err
	}
	demands := []demand{own}
	k := podresources.At(f.request.kubeletDir)
	if f.request.cpus > 0 {
		d, err := n.cpuDemand(ctx, k, machine, f.request.cpus)
		if err != nil {
			return nil, err
		}
		demands = append(demands, d)
	}
	for _, text := range f.request.with {
		name, count, err := parseWith(text)
		if err != nil {
			return nil, err
		}
		var d demand
		if slices.ContainsFunc(n.pools, func(p pool.Pool) bool { return p.Name == name }) {
			d, err = n.poolDemand(machine, name, count)
		} else {
			d, err = foreignDemand(ctx, k, machine, name, count)
		}
		if err == nil && slices.ContainsFunc(demands, func(other demand) bool { return other.name == d.name }) {
			err = fmt.Errorf("--with %s: the request has this resource already", plain(d.name))
		}
		if err != nil {
			return nil, err
		}
		demands = append(demands, d)
	}
	return demands, nil
}

// poolDemand returns the demand for a resource in this node's configuration.
func (n *sriovNode) poolDemand(machine kubelet.Mask, resource string, count int) (demand, error) {
	i := slices.IndexFunc(n.pools, func(p pool.Pool) bool { return p.Name == resource })
	if i < 0 {
		var names []string
		for _, p := range n.pools {
			names = append(names, p.Name)
		}
		return demand{}, fmt.Errorf("--count needs a resource of this node, one of %s", strings.Join(names, ", "))
	}
	if n.pluginErr != nil {
		return demand{}, fmt.Errorf("the device plugin did not say which devices are free: %w", n.pluginErr)
	}
	devices := n.pools[i].Devices
	d := newDemand(machine, resource, count, len(devices), func(i int) []int { return devices[i].Topology })
	for i, device := range devices {
		_, d.Used[i] = n.held[device.Address.String()]
		d.Healthy[i] = n.faults[device.Address.String()] == ""
	}
	return d, nil
}

// cpuDemand returns the demand for a container's exclusive CPUs. The kubelet computes topology hints for CPUs only if the CPU manager has
// the static policy.
func (n *sriovNode) cpuDemand(ctx context.Context, k podresources.Kubelet, machine kubelet.Mask, count int) (demand, error) {
	allocatable, err := podresources.AllocatableCPUs(ctx, k)
	if err != nil {
		return demand{}, fmt.Errorf("the kubelet did not say which CPUs it may allocate: %w", err)
	}
	if len(allocatable) == 0 {
		return demand{}, errors.New("--cpus: the kubelet has no exclusive CPUs, because its cpuManagerPolicy is not static: omit --cpus")
	}
	pods, err := podresources.CPUs(ctx, k)
	if err != nil {
		return demand{}, fmt.Errorf("the kubelet did not say which CPUs are free: %w", err)
	}
	used := map[int64]bool{}
	for _, cpus := range pods {
		for _, cpu := range cpus {
			used[cpu] = true
		}
	}
	var all []int64
	var nodes []int
	for _, node := range n.snapshot.Nodes {
		for _, cpu := range node.CPUList() {
			all, nodes = append(all, int64(cpu)), append(nodes, node.ID)
		}
	}
	d := newDemand(machine, cpuResource, count, len(all), func(i int) []int { return nodes[i : i+1] })
	for i, cpu := range all {
		d.Used[i], d.Healthy[i] = used[cpu], slices.Contains(allocatable, cpu)
	}
	return d, nil
}

// foreignDemand returns the demand for a resource of another device plugin. The kubelet lists only the healthy devices of another plugin's
// resource.
func foreignDemand(ctx context.Context, k podresources.Kubelet, machine kubelet.Mask, resource string, count int) (demand, error) {
	k.Resources = []string{resource}
	devices, err := podresources.Allocatable(ctx, k)
	if err != nil {
		return demand{}, fmt.Errorf("--with %s is no resource of the configuration, and the kubelet did not say which devices it has: %w",
			plain(resource), err)
	}
	if len(devices) == 0 {
		return demand{}, fmt.Errorf("--with %s: neither the configuration nor the kubelet has devices of this resource", plain(resource))
	}
	held, err := podresources.List(ctx, k)
	if err != nil {
		return demand{}, fmt.Errorf("the kubelet did not say which devices of %s are free: %w", plain(resource), err)
	}
	d := newDemand(machine, resource, count, len(devices), func(i int) []int { return devices[i].NUMA })
	for i := range devices {
		for _, h := range held {
			d.Used[i] = d.Used[i] || h.ID == devices[i].ID
		}
	}
	return d, nil
}

// newDemand returns a demand for the given count of devices. The resource has n devices, which are all free. The function `near` returns
// the NUMA nodes of one device, or nothing for a device without a NUMA node.
func newDemand(machine kubelet.Mask, name string, count, n int, near func(int) []int) demand {
	masks := make([]kubelet.Mask, n)
	for i := range masks {
		for _, node := range near(i) {
			if node != pci.Unknown {
				masks[i] |= 1 << node
			}
		}
	}
	return demand{name, count, kubelet.NewDevices(machine, masks)}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/podlace/podlace/integration/markdown"
	"github.com/podlace/podlace/pkg/claim"
)

// numaNode is the name of the attribute that the claims use in matchAttribute.
const numaNode = "resource.kubernetes.io/numaNode"

// nodesTried is how many of 5,000 nodes the scheduler checks for a pod: percentageOfNodesToScore is 10 % by default there.
const nodesTried = 500

// runSimulation runs all measurements and prints the tables.
func runSimulation(ctx context.Context, o simOptions, w io.Writer) error {
	sizes := markdown.NewTable(fmt.Sprintf("Slices of %d nodes", o.nodes), "VFs of a node", "slices of a node",
		"largest slice, protobuf", "per VF, protobuf",
		"per VF, JSON", "all slices, protobuf")
	times := markdown.NewTable(fmt.Sprintf("Allocation on one node of %d, %.0f %% of the VFs taken", o.nodes, 100*o.full), "VFs of a node", "VFs of the claim",
		"matchAttribute", "once for a pod", "one node, median", "one node, p99", fmt.Sprintf("pod, %d nodes tried", nodesTried), "no room")
	for _, vfs := range o.vfs {
		c, err := simulatedCluster(o, vfs)
		if err != nil {
			return err
		}
		c.addSizes(sizes, vfs, o.nodes)
		for _, want := range o.wants {
			for _, match := range []string{"", numaNode} {
				m, err := c.measureClaim(ctx, o, want, match)
				if err != nil {
					return err
				}
				shown := match
				if match == "" {
					shown = "-"
				}
				once, median := timeQuantile(m.cycles, 0.5), timeQuantile(m.times, 0.5)
				times.Row(fmt.Sprint(vfs), fmt.Sprint(want), shown, millis(once), millis(median), millis(timeQuantile(m.times, 0.99)),
					millis(once+nodesTried*median), fmt.Sprintf("%.0f %%", 100*float64(m.failed)/float64(o.rounds)))
			}
		}
	}
	_, err := fmt.Fprintf(w, "%s\n%s", sizes.String(), times.String())
	return err
}

func millis(d time.Duration) string { return fmt.Sprintf("%.2f ms", float64(d.Microseconds())/1000) }

// simulatedCluster returns a cluster whose nodes have two PFs on two NUMA nodes, with some VFs already allocated.
func simulatedCluster(o simOptions, vfs int) (*allocatorInput, error) {
	const config = `{"resourceList": [{"resourceName": "fast", "api": "dra"}]}`
	parsed, err := parseConfig(config)
	if err != nil {
		return nil, err
	}
	i := machine{numa: 2, pfs: 2, vfs: vfs / 2}.inventory(parsed)
	var all []*resourceapi.ResourceSlice
	for n := range o.nodes {
		all = append(all, publishedSlices(nodeName(n), i)...)
	}
	c := newCluster(classList{classOf("example.com/fast")}, all)
	r := rand.New(rand.NewPCG(o.seed, uint64(vfs)))
	for _, s := range all {
		for _, d := range s.Spec.Devices {
			if r.Float64() < o.full {
				c.taken.Insert(structured.MakeDeviceID(claim.Driver, s.Spec.Pool.Name, d.Name))
			}
		}
	}
	return c, nil
}

func nodeName(n int) string { return fmt.Sprintf("worker-%04d.example.com", n) }

// classOf returns a class that equals the output of 'sriov-device-plugin classes'.
func classOf(resource string) *resourceapi.DeviceClass {
	c := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: className(resource)}}
	expression := fmt.Sprintf(`device.driver == %q && device.attributes[%q].resource == %q`, claim.Driver, claim.Driver, resource)
	c.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
	return c
}

// devicesSize returns the size of all devices of a slice in the protobuf encoding, in bytes.
func devicesSize(s *resourceapi.ResourceSlice) int {
	empty := s.DeepCopy()
	empty.Spec.Devices = nil
	return s.Size() - empty.Size()
}

// addSizes adds a table row with the sizes of the ResourceSlices, for nodes with the given number of VFs.
func (c *allocatorInput) addSizes(t *markdown.Table, vfs, nodes int) {
	largest, bytes, devices, text := 0, 0, 0, 0
	perNode := len(c.slices) / nodes
	for _, s := range c.slices[:perNode] {
		data, _ := json.Marshal(s)
		largest, bytes, devices, text = max(largest, s.Size()), bytes+s.Size(), devices+devicesSize(s), text+len(data)
	}
	t.Row(fmt.Sprint(vfs), fmt.Sprint(perNode), fmt.Sprintf("%.1f KB", float64(largest)/1e3), fmt.Sprintf("%d B", devices/vfs),
		fmt.Sprintf("%d B", text/vfs), fmt.Sprintf("%.0f MB", float64(bytes*nodes)/1e6))
}

// measureClaim measures how long it takes to allocate a claim on random nodes. Each time has a new allocator, like a scheduling cycle.
func (c *allocatorInput) measureClaim(ctx context.Context, o simOptions, want int, match string) (m allocationTimes, err error) {
	r := rand.New(rand.NewPCG(o.seed, uint64(want)))
	wish := claimFor(want, match)
	for n := range o.rounds + 1 {
		cycle := time.Now()
		a, err := c.allocator(ctx, channels()[1].features)
		if err != nil {
			return m, err
		}
		began := time.Now()
		results, err := a.Allocate(ctx, newNode(nodeName(r.IntN(o.nodes))), []*resourceapi.ResourceClaim{wish})
		if err != nil {
			return m, err
		}
		if n == 0 {
			continue // the first allocation compiled the expression
		}
		m.times, m.cycles = append(m.times, time.Since(began)), append(m.cycles, began.Sub(cycle))
		if len(results) == 0 {
			m.failed++
		}
	}
	return m, nil
}

// claimFor returns a claim for want VFs, which must have the same value of the attribute match.
func claimFor(want int, match string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "shop", UID: "u1"}}
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "vf", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: className("example.com/fast"), AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: int64(want)}}}
	if match != "" {
		name := resourceapi.FullyQualifiedName(match)
		c.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: &name}}
	}
	return c
}

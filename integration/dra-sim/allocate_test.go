// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/dra"
)

// wish is a selector, as a CEL expression and as a Go function.
type wish struct {
	cel   string
	meets func(resourceapi.Device) bool
}

func text(d resourceapi.Device, name resourceapi.QualifiedName) string {
	a := d.Attributes[name]
	switch {
	case a.StringValue != nil:
		return *a.StringValue
	case a.IntValue != nil:
		return fmt.Sprint(*a.IntValue)
	}
	return ""
}

const own = `device.attributes["sriov.podlace.io"]`

// wishes are the kinds of selectors in docs/DRA.md.
func wishes() []wish {
	return []wish{
		{"true", func(resourceapi.Device) bool { return true }},
		{own + `.numa == 1`, func(d resourceapi.Device) bool { return text(d, "numa") == "1" }},
		{`device.attributes["resource.kubernetes.io"].?numaNode.orValue(-1) == 0`,
			func(d resourceapi.Device) bool { return text(d, "resource.kubernetes.io/numaNode") == "0" }},
		{own + `.pf == "ens0f0"`, func(d resourceapi.Device) bool { return text(d, "pf") == "ens0f0" }},
		{own + `.vf < 1`, func(d resourceapi.Device) bool { return text(d, "vf") == "0" }},
		{own + `.kind == "pf"`, func(d resourceapi.Device) bool { return text(d, "kind") == "pf" }},
	}
}

// request is a request, or one of several alternatives.
type request struct {
	name, resource string
	count          int
	wish           wish
}

func (r request) meets(d resourceapi.Device) bool {
	return text(d, "resource") == r.resource && r.wish.meets(d)
}

// problem is a claim and its node. Each request has alternatives.
type problem struct {
	requests [][]request
	match    resourceapi.QualifiedName // "" for no constraint
	distinct resourceapi.QualifiedName
	devices  []resourceapi.Device // free devices
}

// possible searches all choices of devices for a valid one.
func (p problem) possible() bool {
	var try func(n, alternative, got, from int, taken []int) bool
	try = func(n, alternative, got, from int, taken []int) bool {
		if n == len(p.requests) {
			return p.agree(taken)
		}
		r := p.requests[n][alternative]
		if got == r.count {
			return p.next(n+1, taken, try)
		}
		for i := from; i < len(p.devices); i++ {
			if !slices.Contains(taken, i) && r.meets(p.devices[i]) && try(n, alternative, got+1, i+1, append(slices.Clone(taken), i)) {
				return true
			}
		}
		return false
	}
	return p.next(0, nil, try)
}

// next tries the alternatives of a request.
func (p problem) next(n int, taken []int, try func(n, alternative, got, from int, taken []int) bool) bool {
	if n == len(p.requests) {
		return p.agree(taken)
	}
	for alternative := range p.requests[n] {
		if try(n, alternative, 0, 0, taken) {
			return true
		}
	}
	return false
}

// agree reports whether devices meet the constraints.
func (p problem) agree(taken []int) bool {
	seen := map[string]bool{}
	for k, i := range taken {
		d := p.devices[i]
		if p.match != "" && (text(d, p.match) == "" || text(d, p.match) != text(p.devices[taken[0]], p.match)) {
			return false
		}
		value := text(d, p.distinct)
		if p.distinct != "" && (value == "" || k > 0 && seen[value]) {
			return false
		}
		seen[value] = true
	}
	return true
}

// claim returns the problem's claim.
func (p problem) claim() *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "shop", UID: "u1"}}
	spec := &c.Spec.Devices
	for n, alternatives := range p.requests {
		r := resourceapi.DeviceRequest{Name: fmt.Sprint("r", n)}
		for _, a := range alternatives {
			selectors := []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: a.wish.cel}}}
			if len(alternatives) == 1 {
				r.Exactly = &resourceapi.ExactDeviceRequest{DeviceClassName: className(a.resource), Selectors: selectors, Count: int64(a.count),
					AllocationMode: resourceapi.DeviceAllocationModeExactCount}
				continue
			}
			r.FirstAvailable = append(r.FirstAvailable, resourceapi.DeviceSubRequest{Name: a.name, DeviceClassName: className(a.resource),
				Selectors: selectors, Count: int64(a.count), AllocationMode: resourceapi.DeviceAllocationModeExactCount})
		}
		spec.Requests = append(spec.Requests, r)
	}
	qualified := func(name resourceapi.QualifiedName) *resourceapi.FullyQualifiedName {
		full := resourceapi.FullyQualifiedName(name)
		if !slices.Contains([]byte(name), '/') {
			full = claim.Driver + "/" + full
		}
		return &full
	}
	if p.match != "" {
		spec.Constraints = append(spec.Constraints, resourceapi.DeviceConstraint{MatchAttribute: qualified(p.match)})
	}
	if p.distinct != "" {
		spec.Constraints = append(spec.Constraints, resourceapi.DeviceConstraint{DistinctAttribute: qualified(p.distinct)})
	}
	return c
}

// randomProblem returns a claim for a machine of at most six VFs.
func randomProblem(r *rand.Rand, consumable bool) (problem, machine) {
	m := machine{name: "node", numa: r.IntN(3), pfs: 1 + r.IntN(3), vfs: 1 + r.IntN(2)}
	m.blind = r.IntN(m.pfs)
	var p problem
	resources := []string{"example.com/fast", "example.com/slow"}
	for n := range 1 + r.IntN(3) {
		var alternatives []request
		for a := range 1 + r.IntN(4)/3 {
			alternatives = append(alternatives, request{fmt.Sprintf("a%d", a), resources[r.IntN(len(resources))], 1 + r.IntN(1+n%3),
				wishes()[r.IntN(len(wishes()))]})
		}
		p.requests = append(p.requests, alternatives)
	}
	names := []resourceapi.QualifiedName{"", "", "resource.kubernetes.io/numaNode", "resource.kubernetes.io/pcieRoot", "pf", "card", "numa"}
	p.match = names[r.IntN(len(names))]
	if consumable && p.match == "" && r.IntN(2) == 0 {
		p.distinct = []resourceapi.QualifiedName{"pf", "card"}[r.IntN(2)]
	}
	return p, m
}

// TestAllocatorFindsWhatIsThere: each of the scheduler's allocators finds devices in Podlace's slices exactly if a search of all
// choices does. It never allocates a device that is taken, tainted or of another resource.
func TestAllocatorFindsWhatIsThere(t *testing.T) {
	c, err := parse()
	if err != nil {
		t.Fatal(err)
	}
	classes, err := printedClasses(t.TempDir(), config)
	if err != nil {
		t.Fatal(err)
	}
	found := map[bool]int{}
	for _, ch := range channels() {
		for seed := range uint64(machines) {
			r := rand.New(rand.NewPCG(seed, 2))
			p, m := randomProblem(r, ch.features.ConsumableCapacity)
			i := m.inventory(c)
			for _, d := range i.Snapshot.Devices {
				if r.IntN(5) == 0 {
					i.Faults[d.Address.String()] = dra.Fault{Kind: dra.LinkDown}
				}
			}
			cl := newCluster(classes, published(m.name, i))
			for _, s := range cl.slices {
				for _, d := range s.Spec.Devices {
					switch {
					case r.IntN(4) == 0:
						cl.taken.Insert(structured.MakeDeviceID(claim.Driver, m.name, d.Name))
					case len(d.Taints) == 0:
						p.devices = append(p.devices, d)
					}
				}
			}
			results := allocate(t, cl, ch, m, p)
			found[results != nil]++
			if want := p.possible(); want != (results != nil) {
				t.Fatalf("%s, seed %d: found %v, want %v: %+v of %+v", ch.name, seed, results, want, p, m)
			}
			p.verify(t, results)
		}
	}
	if found[true] < 100 || found[false] < 100 {
		t.Errorf("the problems are too easy or too hard: %v", found)
	}
}

// allocate returns the allocation for the claim of a problem, or nil if there is none.
func allocate(t *testing.T, cl *cluster, ch channel, m machine, p problem) []resourceapi.DeviceRequestAllocationResult {
	t.Helper()
	a, err := cl.allocator(t.Context(), ch.features)
	if err != nil {
		t.Fatal(err)
	}
	results, err := a.Allocate(t.Context(), node(m.name), []*resourceapi.ResourceClaim{p.claim()})
	if err != nil {
		t.Fatalf("%s: %v: %+v", ch.name, err, p)
	}
	if len(results) == 0 {
		return nil
	}
	return results[0].Devices.Results
}

// verify checks that each device is free and is allocated once.
func (p problem) verify(t *testing.T, results []resourceapi.DeviceRequestAllocationResult) {
	t.Helper()
	given := map[string]bool{}
	for _, r := range results {
		free := slices.ContainsFunc(p.devices, func(d resourceapi.Device) bool { return d.Name == r.Device })
		if !free || given[r.Device] {
			t.Errorf("%s is given, and it is not free or given twice: %+v", r.Device, p)
		}
		given[r.Device] = true
	}
}

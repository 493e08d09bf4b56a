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
	"github.com/podlace/podlace/pkg/daemon/dra"
)

// selectorCase is one device selector as a CEL expression and as a Go function.
type selectorCase struct {
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

// selectorCases returns one selector of each kind that docs/DRA.md shows.
func selectorCases() []selectorCase {
	return []selectorCase{
		{"true", func(resourceapi.Device) bool { return true }},
		{own + `.numa == 1`, func(d resourceapi.Device) bool { return text(d, "numa") == "1" }},
		{`device.attributes["resource.kubernetes.io"].?numaNode.orValue(-1) == 0`,
			func(d resourceapi.Device) bool { return text(d, "resource.kubernetes.io/numaNode") == "0" }},
		{own + `.pf == "ens0f0"`, func(d resourceapi.Device) bool { return text(d, "pf") == "ens0f0" }},
		{own + `.vf < 1`, func(d resourceapi.Device) bool { return text(d, "vf") == "0" }},
		{own + `.kind == "pf"`, func(d resourceapi.Device) bool { return text(d, "kind") == "pf" }},
	}
}

// requestCase is a claim's request, or one alternative of a prioritized request.
type requestCase struct {
	name, resource string
	count          int
	wish           selectorCase
}

func (r requestCase) meets(d resourceapi.Device) bool {
	return text(d, "resource") == r.resource && r.wish.meets(d)
}

// claimProblem is a claim and a node's free devices. Each request is a list of alternatives.
type claimProblem struct {
	requests [][]requestCase
	match    resourceapi.QualifiedName // "" for no constraint
	distinct resourceapi.QualifiedName
	devices  []resourceapi.Device // free devices
}

// isPossible tries all combinations of free devices, and reports whether one combination satisfies the claim.
func (p claimProblem) isPossible() bool {
	var try func(n, alternative, got, from int, taken []int) bool
	try = func(n, alternative, got, from int, taken []int) bool {
		if n == len(p.requests) {
			return p.meetsConstraints(taken)
		}
		r := p.requests[n][alternative]
		if got == r.count {
			return p.tryAlternatives(n+1, taken, try)
		}
		for i := from; i < len(p.devices); i++ {
			if !slices.Contains(taken, i) && r.meets(p.devices[i]) && try(n, alternative, got+1, i+1, append(slices.Clone(taken), i)) {
				return true
			}
		}
		return false
	}
	return p.tryAlternatives(0, nil, try)
}

// tryAlternatives calls the given function for each alternative of request n, until one call returns true.
func (p claimProblem) tryAlternatives(n int, taken []int, try func(n, alternative, got, from int, taken []int) bool) bool {
	if n == len(p.requests) {
		return p.meetsConstraints(taken)
	}
	for alternative := range p.requests[n] {
		if try(n, alternative, 0, 0, taken) {
			return true
		}
	}
	return false
}

// meetsConstraints reports whether the chosen devices meet the constraints of the claim.
func (p claimProblem) meetsConstraints(taken []int) bool {
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

// toClaim converts the requests and constraints of a claimProblem into a ResourceClaim.
func (p claimProblem) toClaim() *resourceapi.ResourceClaim {
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

// randomProblem returns a random claim and a machine with at most six VFs.
func randomProblem(r *rand.Rand, consumable bool) (claimProblem, machine) {
	m := machine{name: "node", numa: r.IntN(3), pfs: 1 + r.IntN(3), vfs: 1 + r.IntN(2)}
	m.blind = r.IntN(m.pfs)
	var p claimProblem
	resources := []string{"example.com/fast", "example.com/slow"}
	for n := range 1 + r.IntN(3) {
		var alternatives []requestCase
		for a := range 1 + r.IntN(4)/3 {
			alternatives = append(alternatives, requestCase{fmt.Sprintf("a%d", a), resources[r.IntN(len(resources))], 1 + r.IntN(1+n%3),
				selectorCases()[r.IntN(len(selectorCases()))]})
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

// TestAllocatorFindsWhatIsThere compares each allocator of the scheduler with a search of all device combinations in Podlace's slices: it
// must find devices exactly if the search does. None may be allocated, tainted, or another resource's.
func TestAllocatorFindsWhatIsThere(t *testing.T) {
	c, err := parseDefaultConfig()
	if err != nil {
		t.Fatal(err)
	}
	classes, err := printedClasses(t.TempDir(), defaultConfig)
	if err != nil {
		t.Fatal(err)
	}
	found := map[bool]int{}
	for _, ch := range channels() {
		for seed := range uint64(machineCount) {
			r := rand.New(rand.NewPCG(seed, 2))
			p, m := randomProblem(r, ch.features.ConsumableCapacity)
			i := m.inventory(c)
			for _, d := range i.Snapshot.Devices {
				if r.IntN(5) == 0 {
					i.Faults[d.Address.String()] = dra.Fault{Kind: dra.LinkDown}
				}
			}
			cl := newCluster(classes, publishedSlices(m.name, i))
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
			results := allocateClaim(t, cl, ch, m, p)
			found[results != nil]++
			if want := p.isPossible(); want != (results != nil) {
				t.Fatalf("%s, seed %d: found %v, want %v: %+v of %+v", ch.name, seed, results, want, p, m)
			}
			p.verifyResults(t, results)
		}
	}
	if found[true] < 100 || found[false] < 100 {
		t.Errorf("the problems are too easy or too hard: %v", found)
	}
}

// allocateClaim returns the devices that the allocator chooses for a claim, or nil if none are possible.
func allocateClaim(t *testing.T, cl *allocatorInput, ch allocatorVariant, m machine,
	p claimProblem) []resourceapi.DeviceRequestAllocationResult {
	t.Helper()
	a, err := cl.allocator(t.Context(), ch.features)
	if err != nil {
		t.Fatal(err)
	}
	results, err := a.Allocate(t.Context(), newNode(m.name), []*resourceapi.ResourceClaim{p.toClaim()})
	if err != nil {
		t.Fatalf("%s: %v: %+v", ch.name, err, p)
	}
	if len(results) == 0 {
		return nil
	}
	return results[0].Devices.Results
}

// verifyResults checks that each allocated device was free and is allocated only once.
func (p claimProblem) verifyResults(t *testing.T, results []resourceapi.DeviceRequestAllocationResult) {
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

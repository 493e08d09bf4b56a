// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/dra"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// allocatorFeatures are the features that Kubernetes 1.37 enables by default.
func allocatorFeatures() structured.Features {
	return structured.Features{AdminAccess: true, PrioritizedList: true, DeviceTaints: true, PartitionableDevices: true,
		ConsumableCapacity: true, DeviceBindingAndStatus: true}
}

func celFeatures() cel.Features { return cel.Features{EnableConsumableCapacity: true} }

// patience limits the allocator's search through all combinations of devices. The scheduler waits as long.
const patience = 10 * time.Second

// allocate allocates a claim on the first node that can hold it, or returns nil if none can.
func (c *checker) allocate(d resourceapi.DeviceClaim) (*resourceapi.ResourceClaim, error) {
	ctx, cancel := context.WithTimeout(c.ctx, patience)
	defer cancel()
	one := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "claim", UID: "claim"}}
	one.Spec.Devices = d
	a, err := structured.NewAllocator(ctx, allocatorFeatures(), structured.AllocatedState{}, c, c.slices, c.compiled)
	if err != nil {
		return nil, err
	}
	for _, node := range c.nodes {
		results, err := a.Allocate(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, []*resourceapi.ResourceClaim{one})
		if err != nil {
			return nil, err
		}
		if len(results) == 1 {
			one.Status.Allocation = &results[0]
			return one, nil
		}
	}
	return nil, nil
}

// allocateAll allocates the claim once for each alternative and resource that the scheduler may choose, and returns what the node would
// make of each.
func (c *checker) allocateAll(m manifest, path string, d resourceapi.DeviceClaim, here []option) (rows []served) {
	if c.tooMany(m, here) {
		return nil // the allocator would try all combinations of devices
	}
	switch whole, err := c.allocate(d); {
	case err != nil:
		c.fail("%s: %s", m.at(path+".requests"), reason(err))
		return nil
	case whole == nil:
		c.explain(m, path, d, here)
		return nil
	}
	for _, o := range here {
		if alone, _ := c.allocate(only(d, o)); alone != nil {
			rows = append(rows, c.serveAll(m, path, d, o)...)
		} else if len(o.matched) > 0 { // otherwise matchRequest has reported it
			c.notice("%s: no node can hold this alternative: %s", m.at(o.path), o.shortage())
		}
	}
	return rows
}

// serveAll allocates the claim once for each resource of an alternative, or once if no resource fills the request alone.
func (c *checker) serveAll(m manifest, path string, d resourceapi.DeviceClaim, o option) (rows []served) {
	for _, resource := range append(o.resources(), "") {
		if one, _ := c.allocate(prefer(d, o, resource)); one != nil && (resource != "" || rows == nil) {
			if row, ok := c.serve(m, path, one, o); ok && !o.wrong {
				rows = append(rows, row)
			}
		}
	}
	return rows
}

// tooMany reports requests for which no node has as many devices as each alternative wants.
func (c *checker) tooMany(m manifest, here []option) (found bool) {
	for _, o := range here {
		if !slices.ContainsFunc(here, func(other option) bool { return other.request == o.request && other.Count <= other.most() }) {
			c.lack("%s: no node can hold the request: %s", m.at(o.path), o.shortage())
			found = true
		}
	}
	return found
}

func reason(err error) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Sprintf("the search for devices takes more than %s, after which the scheduler gives up: ask for less", patience)
	}
	return strings.TrimPrefix(err.Error(), "claim claim, ") // as allocate names it
}

// only returns the claim with a single request, which has no other alternative, and without constraints.
func only(d resourceapi.DeviceClaim, o option) resourceapi.DeviceClaim {
	out := prefer(d, o, "")
	out.Requests, out.Constraints = out.Requests[o.request:o.request+1], nil
	if r := &out.Requests[0]; o.sub >= 0 {
		r.FirstAvailable = r.FirstAvailable[:1]
	}
	return out
}

// prefer returns the claim with the alternative before the others, and restricted to a resource if its name is not empty.
func prefer(d resourceapi.DeviceClaim, o option, resource string) resourceapi.DeviceClaim {
	out := *d.DeepCopy()
	if selectors, _, _ := fieldsOf(&out, o); resource != "" {
		*selectors = append(*selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: selectorOf(resource)}})
	}
	if all := out.Requests[o.request].FirstAvailable; o.sub >= 0 {
		all[0], all[o.sub] = all[o.sub], all[0]
	}
	return out
}

// explain reports why no node can hold a claim: because of a single request, a constraint, or all requests together.
func (c *checker) explain(m manifest, path string, d resourceapi.DeviceClaim, here []option) {
	holds := func(d resourceapi.DeviceClaim) bool {
		one, err := c.allocate(d)
		return one != nil || err != nil
	}
	before := len(c.problems) + len(c.notices)
	for _, o := range here {
		if !slices.ContainsFunc(here, func(other option) bool { return other.request == o.request && holds(only(d, other)) }) {
			why := "its devices have taints, or a claim has their PF as a whole"
			if o.Capacity != nil && o.resources() != nil {
				why = "VFs have no capacity: remove the key capacity"
			}
			c.lack("%s: no node can hold the request: %s", m.at(o.path), why)
		}
	}
	for i := range d.Constraints {
		one := *d.DeepCopy()
		one.Constraints = one.Constraints[i : i+1]
		if len(c.problems)+len(c.notices) == before && !holds(one) {
			c.lack("%s: no node can hold the requests with this constraint", m.at(fmt.Sprintf("%s.constraints[%d]", path, i)))
		}
	}
	if len(c.problems)+len(c.notices) == before {
		c.lack("%s: a node can hold each request, but no node all of them", m.at(path+".requests"))
	}
}

// serve computes the settings of an alternative in an allocation. ok is false if the scheduler chose another one or the settings are
// wrong.
func (c *checker) serve(m manifest, path string, one *resourceapi.ResourceClaim, o option) (row served, ok bool) {
	config, err := c.settings(one)
	results := one.Status.Allocation.Devices.Results
	i := slices.IndexFunc(results, func(r resourceapi.DeviceRequestAllocationResult) bool { return r.Request == o.name })
	if c.failSettings(m, path, one, err); err != nil || i < 0 {
		return row, false
	}
	row = served{Object: m.String(), Request: o.name, Class: o.DeviceClassName, Devices: o.devices(), Settings: []setting{},
		Resource: c.target(results[i].Pool, results[i].Device).Resource.FullName()}
	for _, text := range c.refused[row.Resource] {
		c.notice("%s: %s", m.at(o.path), text)
	}
	c.checkKinds(m, o, config[i])
	for _, key := range config[i].Set() {
		from := "class"
		if slices.Contains(config[i].Claimed, key) {
			from = "claim"
		}
		row.Settings = append(row.Settings, setting{key, config[i].Text(key), from})
	}
	if err := config[i].Complete(func(key string) string { return key }); err != nil {
		c.notice("%s: the settings of class and claim: %v; ADD fails unless the conflist sets vlan", m.at(o.path), err)
	}
	return row, true
}

// checkKinds reports a setting that some of the devices that the scheduler may choose cannot have.
func (c *checker) checkKinds(m manifest, o option, settings *vfconfig.Config) {
	key, lacking := "", 0
	for _, d := range o.matched {
		if lacks := d.target().Lacks(settings); lacks != "" {
			key, lacking = lacks, lacking+1
		}
	}
	if lacking > 0 {
		c.fail("%s: %d of %d matching devices are no VFs with a PF on the node, which alone can set %s %s: add the selector %s == \"vf\"", m.at(o.path),
			lacking, len(o.matched), key, settings.Text(key), attribute{claim.Driver, "kind"}.expression())
	}
}

// entryFault matches an error of the driver about a config entry of the claim: its index, the key if one is wrong, and the text.
var entryFault = regexp.MustCompile(`^config\[(\d+)\]\.opaque\.parameters(?:\.(\w+):?)?:? (.*)`)

// failSettings reports why the driver refuses the settings of a claim, removing what is wrong until nothing is.
func (c *checker) failSettings(m manifest, path string, one *resourceapi.ResourceClaim, err error) {
	for err != nil && one != nil {
		fault := entryFault.FindStringSubmatch(err.Error())
		if fault == nil {
			c.fail("%s: %v", m.at(path), err)
			return
		}
		c.fail("%s: %s", m.at(strings.TrimSuffix(fmt.Sprintf("%s.config[%s].opaque.parameters.%s", path, fault[1], fault[2]), ".")), fault[3])
		i, _ := strconv.Atoi(fault[1])
		values, entry := map[string]json.RawMessage{}, one.Spec.Devices.Config[i].Opaque
		_ = json.Unmarshal(entry.Parameters.Raw, &values) // the driver has decoded it
		if _, ok := values[fault[2]]; !ok {
			entry.Driver = "none"
		}
		delete(values, fault[2])
		entry.Parameters.Raw, _ = json.Marshal(values)
		if one, _ = c.allocate(one.Spec.Devices); one != nil {
			_, err = c.settings(one)
		}
	}
}

// settings returns the settings of the VFs of an allocated claim, as the driver would merge them.
func (c *checker) settings(one *resourceapi.ResourceClaim) ([]*vfconfig.Config, error) {
	devices := &one.Status.Allocation.Devices
	foreign := func(r resourceapi.DeviceRequestAllocationResult) bool { return r.Driver != claim.Driver }
	devices.Results = slices.DeleteFunc(devices.Results, foreign)
	return dra.Settings(one, func(name string) dra.Target { return c.target(devices.Results[0].Pool, name) })
}

// target returns what the settings of a device depend on, except its resource. That of another driver has no kind.
func (d device) target() (t dra.Target) {
	own := d.attributes()
	t.Kind, _ = own[attribute{claim.Driver, "kind"}].(string)
	t.Driver, _ = own[attribute{claim.Driver, "driver"}].(string)
	return t
}

// target returns what the settings of a device depend on.
func (c *checker) target(from, name string) dra.Target {
	i := slices.IndexFunc(c.devices, func(d device) bool { return d.pool == from && d.Name == name && d.driver == claim.Driver })
	t := c.devices[i].target()
	t.Resource = c.resourceNamed(c.devices[i].resource())
	return t
}

// resourceNamed returns a resource. One that is not in the configuration lets claims set each key.
func (c *checker) resourceNamed(of string) *pool.Resource {
	if r := c.resources[of]; r != nil {
		return r
	}
	c.notice("resource %s is not in the configuration (--config-file), so it was not checked what claims may set", of)
	prefix, short, _ := strings.Cut(of, "/")
	r := &pool.Resource{Prefix: prefix, Name: short, ClaimMay: vfconfig.Allowance{}}
	for _, key := range vfconfig.Keys() {
		r.ClaimMay[key] = nil
	}
	return r
}

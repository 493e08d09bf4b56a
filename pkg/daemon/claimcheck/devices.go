// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/dra"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/daemon/poolfile"
	"github.com/podlace/podlace/pkg/pci"
)

// attribute is a device attribute by domain and name.
type attribute struct{ domain, name string }

func (a attribute) String() string { return a.domain + "/" + a.name }

// expression returns the CEL expression that reads the attribute.
func (a attribute) expression() string {
	return fmt.Sprintf("device.attributes[%q].%s", a.domain, a.name)
}

// device is a device of a ResourceSlice.
type device struct {
	resourceapi.Device
	driver, pool string
	node         string // "" for each node
	selected     bool   // a nodeSelector says which nodes have it
}

func (d device) resource() string {
	name, _ := d.attributes()[attribute{claim.Driver, "resource"}].(string)
	return name
}

func (d device) attributes() map[attribute]any {
	out := map[attribute]any{}
	for name, value := range d.Attributes {
		domain, id, full := strings.Cut(string(name), "/")
		if !full {
			domain, id = d.driver, domain
		}
		out[attribute{domain, id}] = valueOf(value)
	}
	return out
}

// valueOf returns the value as CEL has it. Versions and lists, which no VF has, are not compared.
func valueOf(a resourceapi.DeviceAttribute) any {
	switch {
	case a.StringValue != nil:
		return *a.StringValue
	case a.IntValue != nil:
		return *a.IntValue
	case a.BoolValue != nil:
		return *a.BoolValue
	}
	return nil
}

// A cluster is the devices against which claims are checked.
type cluster struct {
	slices  []*resourceapi.ResourceSlice
	devices []device
	nodes   []string
	example bool                       // the devices are examples, because none are known
	values  map[attribute]map[any]bool // of all devices
	drivers map[string]bool            // that have devices
}

func newCluster(list []*resourceapi.ResourceSlice, example bool) cluster {
	c := cluster{slices: list, example: example, values: map[attribute]map[any]bool{}, drivers: map[string]bool{}}
	for _, s := range list {
		whole := spread(&s.Spec.NodeSelector, &s.Spec.AllNodes)
		for i := range s.Spec.Devices {
			d := &s.Spec.Devices[i]
			one := device{driver: s.Spec.Driver, pool: s.Spec.Pool.Name, node: ptr.Deref(cmp.Or(d.NodeName, s.Spec.NodeName), ""),
				selected: spread(&d.NodeSelector, &d.AllNodes) || whole}
			one.Device = *d
			if one.node != "" && !slices.Contains(c.nodes, one.node) {
				c.nodes = append(c.nodes, one.node)
			}
			c.devices, c.drivers[s.Spec.Driver] = append(c.devices, one), true
			for a, value := range one.attributes() {
				if c.values[a] == nil {
					c.values[a] = map[any]bool{}
				}
				c.values[a][value] = true
			}
		}
	}
	if len(c.nodes) == 0 {
		c.nodes = []string{""} // any node
	}
	return c
}

// spread puts devices within reach of all nodes if a nodeSelector selects their nodes. Slices do not contain the labels of nodes.
func spread(selector **corev1.NodeSelector, all **bool) bool {
	if *selector == nil {
		return false
	}
	*selector, *all = nil, ptr.To(true)
	return true
}

// literals returns the values that devices have for an attribute, as CEL writes them.
func (c cluster) literals(a attribute) (out []string) {
	for v := range c.values[a] {
		out = append(out, literal(v))
	}
	slices.Sort(out)
	return out
}

// describe lists some of the values that devices have for an attribute.
func (c cluster) describe(a attribute) string {
	out := c.literals(a)
	if most := 6; len(out) > most {
		out = append(out[:most], "...")
	}
	return strings.Join(out, ", ")
}

func literal(v any) string {
	text, _ := json.Marshal(v)
	return string(text)
}

// loadCluster returns the devices of the flag --slices, those of this node, or examples.
func (c *checker) loadCluster(o *options, config *pool.Config) (cluster, error) {
	if o.slices != "" {
		list, err := c.readSlices(o.slices)
		return newCluster(list, false), err
	}
	i, err := o.nodeInventory(config)
	if err != nil {
		return cluster{}, err
	}
	for _, p := range i.Pools {
		c.refused[p.Name] = p.Refused(i.Snapshot)
	}
	if !slices.ContainsFunc(i.Pools, func(p pool.Pool) bool { return len(p.Devices) > 0 }) {
		return newCluster(publish(exampleInventory(config), "example"), true), nil
	}
	return newCluster(publish(i, o.Host), false), nil
}

// readSlices reads the output of 'kubectl get resourceslices -o json' or -o yaml.
func (c *checker) readSlices(name string) (list []*resourceapi.ResourceSlice, err error) {
	all, err := c.readManifests(nil, name)
	for _, m := range all {
		if m.kind() != "ResourceSlice" {
			continue
		}
		s := &resourceapi.ResourceSlice{}
		text, _ := json.Marshal(m.root)
		if err := json.Unmarshal(text, s); err != nil || s.APIVersion != claimAPI {
			return nil, fmt.Errorf("%s: want a ResourceSlice of %s: %w", m.root.Where(), claimAPI, cmp.Or(err, fmt.Errorf("it is of %s", s.APIVersion)))
		}
		list = append(list, s)
	}
	if len(list) == 0 && err == nil {
		err = fmt.Errorf("%s: no ResourceSlice: write it with 'kubectl get resourceslices -o json'", name)
	}
	return list, err
}

// nodeInventory returns the devices of this node as the daemon would find them without pods.
func (o *options) nodeInventory(config *pool.Config) (i dra.Inventory, err error) {
	snapshot, env, err := poolfile.Scan(o.sysfs)
	switch {
	case errors.Is(err, fs.ErrNotExist): // a machine without PCI
		return i, nil
	case err != nil:
		return i, err
	}
	i.Snapshot = snapshot
	for _, p := range pool.Assign(config, i.Snapshot, env) {
		if p.Resource.API == pool.DRA {
			i.Pools = append(i.Pools, p)
		}
	}
	for _, n := range i.Snapshot.Nodes {
		i.Nodes = append(i.Nodes, n.ID)
	}
	return i, nil
}

// exampleInventory returns an inventory with two PFs for each resource, on two NUMA nodes, each with as many VFs as a claim can get.
func exampleInventory(config *pool.Config) dra.Inventory {
	i := dra.Inventory{Snapshot: &pci.Snapshot{}, Nodes: []int{0, 1}}
	for n := range config.Resources {
		r := &config.Resources[n]
		if r.API != pool.DRA {
			continue
		}
		p := pool.Pool{Name: r.FullName(), Resource: r}
		for node := range i.Nodes {
			address := func(function int) pci.Address {
				a, _ := pci.ParseAddress(fmt.Sprintf("%04x:%02x:%02x.%d", n, node, function/8, function%8)) // it is valid for each resource
				return a
			}
			pf := pci.Device{Address: address(0), Interfaces: []string{fmt.Sprintf("ens%df0", node+1)}, VFIndex: pci.Unknown}
			i.Snapshot.Devices = append(i.Snapshot.Devices, pf)
			for vf := range resourceapi.AllocationResultsMaxSize {
				d := pci.Device{Address: address(8 + vf), PF: pf.Address, VFIndex: vf, Vendor: "8086", Product: "1889", Driver: "iavf",
					LinkType: pci.Ether, NUMANode: node, Root: fmt.Sprintf("pci%04x:%02x", n, node), RDMA: [][]string{{"rdma0"}, nil}[vf%2]}
				p.Devices = append(p.Devices, pool.Device{Device: d})
			}
		}
		i.Pools = append(i.Pools, p)
	}
	return i
}

// publish returns the ResourceSlices of a node.
func publish(i dra.Inventory, node string) (out []*resourceapi.ResourceSlice) {
	all := dra.Resources(i, node, nil, time.Now()).Pools[node].Slices
	for n, s := range all {
		out = append(out, &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(node, "-", n)},
			Spec: resourceapi.ResourceSliceSpec{Driver: claim.Driver, NodeName: &node, Devices: s.Devices, SharedCounters: s.SharedCounters,
				Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: int64(len(all))}}})
	}
	return out
}

// ownAttributes returns the attributes of every VF with the types of their values.
func ownAttributes() map[attribute]any {
	config := &pool.Config{Resources: []pool.Resource{{API: pool.DRA}}}
	return newCluster(publish(exampleInventory(config), "example"), true).devices[0].attributes()
}

// namesIn returns the names of the known attributes in a domain.
func namesIn(known map[attribute]any, domain string) (names []string) {
	for _, a := range slices.SortedFunc(maps.Keys(known), func(a, b attribute) int { return strings.Compare(a.name, b.name) }) {
		if a.domain == domain {
			names = append(names, a.name)
		}
	}
	return names
}

// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
)

// resourceOffer is an immutable list of the devices that a resource offers to the kubelet at one time.
type resourceOffer struct {
	pool     pool.Pool
	snapshot *pci.Snapshot
	topology *pool.Topology
	devices  []*pluginapi.Device // devices of the pool, then the lost ones
	faults   map[string]string   // by ID
	grant    deviceGrant
}

// newOffer returns the offer of a pool. Devices in `lost` are missing or belong to another resource, but a pod still has them. They
// stay as unhealthy with their last known NUMA nodes, because a restarted kubelet admits a running pod again only with its devices in
// the offer.
func newOffer(p pool.Pool, s *pci.Snapshot, g deviceGrant, faults map[string]string, lost []poddevices.Device) *resourceOffer {
	o := &resourceOffer{pool: p, snapshot: s, topology: pool.NewTopology(p, s), grant: g, faults: faults}
	for _, d := range p.Devices {
		o.devices = append(o.devices, device(d.Address.String(), o.faults[d.Address.String()] == "", d.Topology))
	}
	for _, h := range lost {
		o.devices = append(o.devices, device(h.ID, false, h.NUMA))
	}
	return o
}

func (o *resourceOffer) numaNodes(id string) (nodes []int) {
	for _, d := range o.devices {
		if d.GetID() == id {
			for _, n := range d.GetTopology().GetNodes() {
				nodes = append(nodes, int(n.GetID()))
			}
		}
	}
	return nodes
}

func device(id string, healthy bool, nodes []int) *pluginapi.Device {
	d := &pluginapi.Device{ID: id, Health: pluginapi.Unhealthy}
	if healthy {
		d.Health = pluginapi.Healthy
	}
	for _, n := range nodes {
		if d.Topology == nil {
			d.Topology = &pluginapi.TopologyInfo{}
		}
		d.Topology.Nodes = append(d.Topology.Nodes, &pluginapi.NUMANode{ID: int64(n)})
	}
	return d
}

func (o *resourceOffer) countHealthy() (n int) {
	for _, d := range o.devices {
		if d.Health == pluginapi.Healthy {
			n++
		}
	}
	return n
}

// equalTo reports whether two offers have the same devices, with the same health and NUMA nodes.
func (o *resourceOffer) equalTo(other *resourceOffer) bool {
	return slices.EqualFunc(o.devices, other.devices, func(a, b *pluginapi.Device) bool { return proto.Equal(a, b) })
}

// allocationPolicy returns by which policy devices are preferred. It does not matter for a resource that left the configuration,
// because all its devices are in use.
func (o *resourceOffer) allocationPolicy() pool.Policy {
	if o.pool.Resource == nil {
		return pool.NUMABestFit
	}
	return o.pool.Resource.Policy
}

// allocate returns the settings that a container needs for the devices, in the order of their addresses.
func (o *resourceOffer) allocate(ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	var devices []pool.Device
	for _, id := range ids {
		d, err := o.find(id)
		if err != nil {
			return nil, err
		}
		devices = append(devices, d)
	}
	slices.SortFunc(devices, func(a, b pool.Device) int { return a.Address.Compare(b.Address) })
	return o.grant.containerResponse(o.pool.Name, devices)
}

func (o *resourceOffer) allocateAll(containers []*pluginapi.ContainerAllocateRequest) (*pluginapi.AllocateResponse, error) {
	out := &pluginapi.AllocateResponse{}
	for _, c := range containers {
		one, err := o.allocate(c.GetDevicesIds())
		if err != nil {
			return nil, err
		}
		out.ContainerResponses = append(out.ContainerResponses, one)
	}
	return out, nil
}

// checkPresent returns an error if the node does not have the device. A device counts as present even if it belongs to another resource
// now.
func (o *resourceOffer) checkPresent(id string) error {
	a, err := pci.ParseAddress(id)
	if err != nil {
		return err
	}
	if _, ok := o.snapshot.Device(a); !ok {
		return fmt.Errorf("device %s does not exist on this node: its card has fewer VFs than before, or is gone; delete the pod", a)
	}
	return nil
}

func (o *resourceOffer) find(id string) (pool.Device, error) {
	for _, d := range o.pool.Devices {
		if d.Address.String() == id {
			return d, nil
		}
	}
	return pool.Device{}, fmt.Errorf("device %+.80q is not in this resource: the configuration or the device has changed; delete the pod", id)
}

// SPDX-License-Identifier: Apache-2.0

// Package dra gives out VFs by Dynamic Resource Allocation: it publishes them in ResourceSlices and prepares the ResourceClaims of pods for
// the kubelet. The CNI plugin sriov attaches the VFs by the records of pkg/claim. Nothing here decides over a VF alone: which VFs a
// resource has, whether they are healthy and who holds them is the daemon's answer, the Inventory.
//
// The API server may be away, refuse a request, or lack a feature: then the daemon logs it once and tries again. Neither the device plugin
// API nor the ADD of a pod waits for the API server.
package dra

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/pool"
)

// Options are what a Driver needs of its daemon.
type Options struct {
	Node     string               // name of the Node object; the pool of all slices
	Client   kubernetes.Interface // the API server
	Kubelet  string               // root folder of the kubelet, with plugins_registry, plugins and dra_manager_state
	Claims   string               // folder of the claims' records (pkg/claim)
	CDI      string               // folder of CDI specifications; "" for a runtime without CDI
	Instance string               // UID of the pod of this daemon, for updates without a gap; "" for a service
	Sysfs    string
	Log      *slog.Logger
	Metrics  prometheus.Registerer // nil for none

	// Change changes devices that no pod has. check reports a device that is in use; it runs while no device is handed out. Until change
	// returns, no pod gets one of the devices.
	Change func(ids []string, check, change func() error) error
	// InUse returns why a device cannot be given to a claim or changed now, such as a pod that has it; "" if it can. It does not look at
	// claims.
	InUse func(id string) string
	// Changed tells the daemon that records of claims have changed: an Update follows.
	Changed func()
}

// Inventory is what the daemon knows at one moment. The receiver changes nothing in it.
type Inventory struct {
	Snapshot *pci.Snapshot
	Pools    []pool.Pool       // resources with "api": "dra", with all their devices, also those that claims hold
	Taints   pool.Taints       // effects of faults
	Held     map[string]string // by PCI address: who has the device otherwise than by a claim, such as a pod by the device plugin API
	Faults   map[string]Fault  // by PCI address: why a pod could not use the device (debounced)
	Nodes    []int             // NUMA nodes of the machine
	// Last is how devices were when they last had an interface on the node.
	Last map[pci.Address]pci.Device
}

// Fault is why a pod could not use a device.
type Fault struct {
	// Kind is one word of at most 63 letters and dashes: LinkDown, Held, or another such as "no-driver".
	Kind string
	Text string // for people
}

// Kinds of faults that have taints of their own.
const (
	LinkDown = "link-down" // the PF has no carrier
	Held     = "held"      // a pod that ended has the interface of the device, and no claim has the device
)

// Driver serves one node.
type Driver struct {
	options Options

	mu      sync.Mutex
	latest  *Inventory
	changed chan struct{} // closed by the next Update

	slices *publisher

	callTimeout time.Duration // callTimeout, less in tests
	failures    repeats       // to prepare and unprepare claims

	count   counters
	lead    leadership
	binds   bindFailures
	news    broadcast // of records: a claim was prepared or unprepared
	conn    connection
	records *claim.Cache
}

// New returns a driver that does nothing before Run.
func New(o Options) *Driver {
	d := &Driver{options: o, changed: make(chan struct{}), callTimeout: callTimeout, count: newCounters(o.Metrics),
		records: claim.NewCache(o.Claims, o.Kubelet)}
	d.lead.waits = "it is not known yet which instance leads"
	d.slices = newPublisher(d)
	return d
}

// Run serves until ctx is done. It returns an error only if it could not start; an API server that is away is no error.
func (d *Driver) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var publishing sync.WaitGroup
	defer publishing.Wait()
	defer cancel() // before the wait
	publishing.Go(func() { d.whileLeading(ctx, d.slices.publish) })
	return d.serve(ctx)
}

// Update tells of a new inventory. It never blocks.
func (d *Driver) Update(i Inventory) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.latest = &i
	close(d.changed)
	d.changed = make(chan struct{})
}

// inventory returns the latest inventory, if there is one.
func (d *Driver) inventory() (Inventory, bool) {
	i, _, ok := d.watch()
	return i, ok
}

// watch returns the latest inventory, if there is one, and a channel that is closed when there is another.
func (d *Driver) watch() (i Inventory, changed <-chan struct{}, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.latest != nil {
		i, ok = *d.latest, true
		i.Faults = d.binds.faults(i.Faults)
	}
	return i, d.changed, ok
}

// Ready returns why pods cannot get devices by claims yet, "" if they can.
func (d *Driver) Ready() string { return d.registered() }

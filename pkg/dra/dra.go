// SPDX-License-Identifier: Apache-2.0

// Package dra offers VFs by Dynamic Resource Allocation. It publishes them in ResourceSlices, and prepares the ResourceClaims of pods for
// the kubelet. The CNI plugin sriov attaches the VFs by the records of pkg/claim. The driver takes all facts about devices from the
// daemon's Inventory: which VFs a resource has, whether they are healthy, and which pods have them.
//
// The API server may be unreachable, refuse a request, or lack a feature. The driver logs that once and retries. Neither the device
// plugin API nor the ADD of a pod waits for the API server.
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

// Options are what a Driver needs from its daemon.
type Options struct {
	Node     string               // name of the Node object; also the name of the pool in all slices
	Client   kubernetes.Interface // client of the API server
	Kubelet  string               // root folder of the kubelet, with plugins_registry, plugins and dra_manager_state
	Claims   string               // folder of claim records (pkg/claim)
	Records  *claim.Cache         // of Claims and Kubelet
	CDI      string               // folder of CDI specifications; "" for a runtime without CDI
	Instance string               // UID of the daemon's pod, for rolling updates; "" for a service
	Sysfs    string
	Log      *slog.Logger
	Metrics  prometheus.Registerer // nil for none

	// Change changes devices that no pod has. check returns an error if a device is in use; no device is allocated while it runs. Until
	// change returns, no pod gets one of the devices.
	Change func(ids []string, check, change func() error) error
	// InUse returns why a device cannot be given to a claim or changed now, such as a pod that has it, or "". It does not consider
	// claims.
	InUse func(id string) string
	// Changed tells the daemon that records of claims have changed. The daemon then calls Update.
	Changed func()
}

// Inventory is the daemon's knowledge at one moment. The receiver must not change it.
type Inventory struct {
	Snapshot *pci.Snapshot
	Pools    []pool.Pool       // resources with "api": "dra", with all their devices, including claimed ones
	Taints   pool.Taints       // effects of taints on faulty devices
	Held     map[string]string // by PCI address: owner of the device other than a claim, such as a pod by the device plugin API
	Faults   map[string]Fault  // by PCI address: why a pod cannot use the device (debounced)
	Nodes    []int             // NUMA nodes of the machine
	// Last are the devices as they were when they last had an interface on the node.
	Last map[pci.Address]pci.Device
}

// Fault is the reason why a pod cannot use a device.
type Fault struct {
	// Kind is one word of at most 63 letters and dashes: LinkDown, Held, or another such as "no-driver".
	Kind string
	Text string // for messages
}

// Kinds of faults that have their own taints.
const (
	LinkDown = "link-down" // the PF has no carrier
	Held     = "held"      // the interface is still in the namespace of an ended pod, and no claim has the device
)

// Driver is the DRA driver of one node.
type Driver struct {
	options Options

	mu      sync.Mutex
	latest  *Inventory
	changed chan struct{} // closed by the next Update

	slices *publisher

	callTimeout time.Duration // the constant callTimeout, less in tests
	failures    repeats       // rate limit for logging failures to prepare and unprepare

	count       counters
	lead        leadership
	binds       bindFailures
	recordsNews broadcast // wakes waiters after a change of the records
	conn        connection
	records     *claim.Cache
}

// New returns a driver. It does nothing before Run.
func New(o Options) *Driver {
	d := &Driver{options: o, changed: make(chan struct{}), callTimeout: callTimeout, count: newCounters(o.Metrics),
		records: o.Records}
	d.lead.whyWaiting = "the leading instance is not determined yet"
	d.slices = newPublisher(d)
	return d
}

// Run serves until ctx is done. It returns an error only if it cannot start. An unreachable API server is not an error.
func (d *Driver) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var publishing sync.WaitGroup
	defer publishing.Wait()
	defer cancel() // ends the goroutines before the wait
	publishing.Go(func() { d.whileLeading(ctx, d.slices.publish) })
	return d.serve(ctx)
}

// Update sets a new inventory. It never blocks.
func (d *Driver) Update(i Inventory) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.latest = &i
	close(d.changed)
	d.changed = make(chan struct{})
}

// inventory returns the latest inventory. ok is false before the first one.
func (d *Driver) inventory() (Inventory, bool) {
	i, _, ok := d.watch()
	return i, ok
}

// watch returns the latest inventory, and a channel that the next Update closes. ok is false before the first Update.
func (d *Driver) watch() (i Inventory, changed <-chan struct{}, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.latest != nil {
		i, ok = *d.latest, true
		i.Faults = d.binds.faults(i.Faults)
	}
	return i, d.changed, ok
}

// Ready returns why pods cannot get devices by claims yet, or "" if they can.
func (d *Driver) Ready() string { return d.whyUnregistered() }

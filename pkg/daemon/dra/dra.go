// SPDX-License-Identifier: Apache-2.0

// Package dra offers VFs through Dynamic Resource Allocation (DRA). It publishes them in ResourceSlices and prepares the ResourceClaims
// of pods for the kubelet; the CNI plugin sriov finds the VFs in the claim records of pkg/claim and attaches them. The daemon passes an
// Inventory to the driver: the VFs of each resource, their health, and the pods that have them.
//
// If the API server is unreachable, refuses a request or lacks a feature, the driver logs it once and tries again. The device plugin
// API and the ADD of a pod never wait for it.
package dra

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
)

// Options contains the settings and functions that a Driver gets from its daemon.
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

	// Change calls check, which fails if a device is in use, and then change for devices that no pod has. Nothing is allocated while
	// check runs, and no pod gets these devices until change returns.
	Change func(ids []string, check, change func() error) error
	// InUse returns why a device must not be changed or allocated to a claim, for example that a pod has it, or "". It does not check
	// claims.
	InUse func(id string) string
	// The driver calls Changed when claim records have changed. The daemon then calls Update.
	Changed func()
}

// Inventory is a snapshot of all that the daemon knows about devices. It must not change once passed to Update.
type Inventory struct {
	Snapshot *pci.Snapshot
	Pools    []pool.Pool       // resources with "api": "dra", with all their devices, including claimed ones
	Taints   pool.Taints       // effects of taints on faulty devices
	Held     map[string]string // by PCI address: owner of the device other than a claim, such as a pod by the device plugin API
	Faults   map[string]Fault  // by PCI address: why a pod cannot use the device (debounced)
	Nodes    []int             // NUMA nodes of the machine
	// Last contains the last known state of each device that had an interface on the node.
	Last map[pci.Address]pci.Device
}

// Fault is the reason why a pod cannot use a device.
type Fault struct {
	// Kind is a word of at most 63 letters and dashes, for example one of the constants LinkDown and Held, or "no-driver".
	Kind string
	Text string // for messages
}

// Faults of the following kinds have their own taints.
const (
	LinkDown = "link-down" // the PF has no carrier
	Held     = "held"      // the interface is still in the namespace of an ended pod, and no claim has the device
)

// Driver is the DRA driver of one node.
type Driver struct {
	options     Options
	records     *claim.Cache
	slices      *publisher
	callTimeout time.Duration // the constant callTimeout, less in tests
	failures    repeatLimit   // rate limit for logging repeated failures
	count       claimCounters
	metadata    sync.Mutex // of metadata files and their CDI specifications
	failed      chan error // receives a fatal error of the running server

	mu         sync.Mutex
	latest     Inventory
	news       chan struct{} // closed by the next change of the inventory, the records or the lead
	leads      bool          // this instance is the leader
	whyWaiting string        // why this instance must not serve the kubelet, or ""
	helper     *kubeletplugin.Helper
	whyDown    string // why no server runs

	bindFailures map[pci.Address]bindFailure
}

// New returns a driver. The driver does nothing before Run is called.
func New(o Options) *Driver {
	d := &Driver{options: o, records: o.Records, callTimeout: callTimeout, count: newCounters(o.Metrics), failed: make(chan error, 1),
		news: make(chan struct{}), bindFailures: map[pci.Address]bindFailure{}, whyWaiting: "the leading instance is not determined yet"}
	d.slices = newPublisher(d)
	return d
}

// Run serves the kubelet and publishes devices until ctx is done, retrying after errors such as an unreachable API server. Call Update
// first.
func (d *Driver) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { d.holdLead(ctx, d.slices.publish, d.collectLoop, d.statusLoop, d.metadataLoop) })
	d.serve(ctx)
}

// Update passes a new inventory to the driver. It never blocks.
func (d *Driver) Update(i Inventory) { d.change(func() { d.latest = i }) }

// change changes the state of the driver and wakes all tasks that wait for a change.
func (d *Driver) change(set func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	set()
	close(d.news)
	d.news = make(chan struct{})
}

func (d *Driver) latestInventory() Inventory {
	i, _ := d.watchInventory()
	return i
}

// watchInventory returns the latest inventory, and a channel that the next change of the inventory, the records or the lead closes.
func (d *Driver) watchInventory() (Inventory, <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := d.latest
	i.Faults = map[string]Fault{}
	maps.Copy(i.Faults, d.latest.Faults)
	for a, f := range d.bindFailures {
		if f.isRecent() {
			i.Faults[a.String()] = Fault{Kind: bindTimeout, Text: f.err.Error()}
		}
	}
	return i, d.news
}

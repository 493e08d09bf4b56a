// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"bytes"
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/pool"
	"github.com/podlace/podlace/pkg/probes"
	"github.com/podlace/podlace/pkg/store"
)

// pollPods is how often the kubelet is asked which pods have which devices.
const pollPods = 10 * time.Second

// daemon holds the resources of a node.
type daemon struct {
	settings
	log       *slog.Logger
	count     counters
	health    *health
	gate      *gate                // before mu
	snapshots <-chan *pci.Snapshot // each that differs from the one before
	records   chan struct{}        // claims were prepared or unprepared
	registry  *prometheus.Registry
	owners    shared // shares the question which pods have the devices that were handed out

	mu          sync.Mutex
	config      *pool.Config
	text        []byte // what config was read from
	refusal     string // why a newer one is not
	snapshot    *pci.Snapshot
	last        map[pci.Address]pci.Device // as they were when they had an interface here
	findings    map[string]bool            // that were told
	held        []allocation.Device        // by the last answer of the kubelet
	asked       bool                       // there was one
	answers     probes.SocketID            // the socket that answered
	since       time.Time                  // when it was first seen
	told        map[string]bool            // the devices that pods had by its answers
	counted     map[string]int             // of each resource, by its answers: devices that it may give away, given or not
	uplinks     []string                   // by the last answer of the kernel
	serving     map[string]*service
	wake        map[chan<- struct{}]bool // of the registrars
	unpublished error                    // why there are no CDI specifications

	claimable    []*offer       // resources that are given out by claims
	driver       claimDriver    // gives them out; nil while there was none
	driverFault  string         // why it cannot start
	unreadClaims error          // why it is not known which devices claims hold
	damaged      error          // records of claims that cannot be read
	running      sync.WaitGroup // all that ever served, until their sockets are gone
	begun        bool           // serving is what it should be
}

// service is a resource that the kubelet is told of.
type service struct {
	*registrar
	stop context.CancelFunc
}

// refresh brings what the kubelet is told in line with what there is, and returns when to do it again, zero if only after a change.
func (d *daemon) refresh(ctx context.Context) (again time.Time) {
	d.gate.Lock() // what is handed out from here on is of the new offers
	defer d.gate.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mergeUnlisted()
	env := d.env()
	d.tellFindings(env)
	all := d.assign(env)
	faults, again := d.health.judge(time.Now(), d.snapshot, all, d.claims())
	pools, claimable := byAPI(all)
	d.updateDRA(ctx, claimable, faults)
	lost := map[string][]allocation.Device{}
	for _, p := range pools {
		lost[p.Name] = d.lost(p)
	}
	for _, name := range slices.Sorted(maps.Keys(d.serving)) {
		_, wanted := lost[name]
		leaving := slices.ContainsFunc(claimable, func(p pool.Pool) bool { return p.Name == name })
		if d.serving[name].leave(leaving); wanted {
			continue
		}
		// The configuration has it no more. While pods have devices of it, the kubelet has to know these.
		p := pool.Pool{Name: name}
		lost[name] = d.lost(p)
		if len(lost[name]) == 0 && (!leaving || d.serving[name].ready()) {
			d.end(name)
			continue
		}
		pools = append(pools, p)
		if len(lost[name]) == 0 {
			again = time.Now().Add(lookEvery) // until the kubelet knows that it leaves
		}
	}
	d.publish(pools, lost)
	for _, p := range pools {
		d.offer(ctx, newOffer(p, d.snapshot, d.grant(p), texts(faults), lost[p.Name]))
	}
	if !d.begun && len(pools) == 0 && len(claimable) == 0 {
		d.log.Warn("no resource is for this node", "hint",
			"until a device plugin registers with the kubelet, sriov refuses all pods with code 11: leave it out of this node's conflist")
	}
	d.begun = true
	return again
}

// publish writes what the runtime needs to know before devices are handed over by CDI. Where that fails the kubelet hands them over.
func (d *daemon) publish(pools []pool.Pool, lost map[string][]allocation.Device) {
	err := (files{d.InfoDir, d.CDIDir}).publish(pools, lost)
	if err != nil && (d.unpublished == nil || err.Error() != d.unpublished.Error()) {
		d.log.Warn("CDI specifications were not written: the kubelet hands device files over", "error", err)
	}
	d.unpublished = err
}

// tellFindings logs what the configuration asks for and this node lacks, each once.
func (d *daemon) tellFindings(env pool.Env) {
	found := map[string]bool{}
	for _, p := range pool.Findings(d.config, d.snapshot, env) {
		found[p.Error()] = true
		if !d.findings[p.Error()] {
			d.log.Warn("the configuration and this node differ", "finding", p.Error())
		}
	}
	d.findings = found
}

// assign makes the pools of the configuration, without devices that pods still have from another resource, which no pod gets. Pools of
// Dynamic Resource Allocation keep them: a device that a claim has stays published, and the driver does not publish the others.
func (d *daemon) assign(env pool.Env) []pool.Pool {
	from := map[string]string{}
	for _, h := range d.held {
		if from[h.ID] = h.Resource; h.Claim != nil {
			from[h.ID] = h.Claim.UID // what a claim holds the kubelet may not give to a container
		}
	}
	pools := pool.Assign(d.config, d.snapshot, env)
	for i, p := range pools {
		if p.Resource.API == pool.DRA {
			continue
		}
		pools[i].Devices = slices.DeleteFunc(slices.Clone(p.Devices), func(dev pool.Device) bool {
			other, ok := from[dev.Address.String()]
			return ok && other != p.Name
		})
	}
	return pools
}

// env is what pools depend on besides the devices. A device whose interface is in a pod counts as it was before.
func (d *daemon) env() pool.Env {
	host, err := kernel.Host()
	if err == nil {
		defer host.Close()
		var names []string
		if names, err = host.Uplinks(); err == nil {
			d.uplinks = names
		}
	}
	if err != nil {
		d.log.Warn("it is not known which interfaces the node itself needs; the last answer counts", "error", err)
	}
	return pool.Env{Last: d.last, DefaultRoute: d.uplinks}
}

// lost returns the devices of a resource that pods have although they are not in its pool, each once. A resource that ends keeps none that
// claims have: the kubelet needs to know only what it gave to containers.
func (d *daemon) lost(p pool.Pool) (lost []allocation.Device) {
	for _, h := range d.held {
		if h.Resource == p.Name && (p.Resource != nil || !byClaim(h)) && !contains(p, h.ID) {
			if s := d.serving[p.Name]; s != nil && len(h.NUMA) == 0 {
				before, _ := s.now()
				h.NUMA = before.nodes(h.ID)
			}
			lost = append(lost, h)
		}
	}
	slices.SortFunc(lost, func(a, b allocation.Device) int { return strings.Compare(a.ID, b.ID) })
	return slices.CompactFunc(lost, func(a, b allocation.Device) bool { return a.ID == b.ID })
}

// contains reports whether a device is in a pool.
func contains(p pool.Pool, id string) bool {
	return slices.ContainsFunc(p.Devices, func(dev pool.Device) bool { return dev.Address.String() == id })
}

// mergeUnlisted adds what was handed out since the kubelet was asked, and what claims hold, of which it does not tell.
func (d *daemon) mergeUnlisted() {
	d.held = merge(d.held, d.gate.handOuts.recent())
	records, err := d.gate.claims.List()
	if err != nil && (d.unreadClaims == nil || err.Error() != d.unreadClaims.Error()) {
		d.log.Error("it is not known which devices claims hold: nothing is changed of any device", "error", err)
	}
	d.unreadClaims = err
	d.tellDamaged(d.gate.claims.Damaged())
	if err == nil { // claims may have been unprepared
		d.held = slices.DeleteFunc(slices.Clone(d.held), byClaim)
	}
	for _, r := range records {
		d.held = merge(d.held, slices.DeleteFunc(slices.Clone(r.Devices), func(h allocation.Device) bool { return h.Claim.Admin }))
	}
}

// tellDamaged logs which records of claims cannot be read, when these have changed.
func (d *daemon) tellDamaged(damaged error) {
	if damaged != nil && (d.damaged == nil || d.damaged.Error() != damaged.Error()) {
		d.log.Error("records of claims cannot be read: these claims keep their devices", "error", damaged, "hint",
			"start the newer version that wrote them; or remove them from "+d.Claims+": the daemon writes them again while pods have the claims")
	}
	d.damaged = damaged
}

// offer tells the endpoint of a resource, which begins to serve with the first offer.
func (d *daemon) offer(ctx context.Context, o *offer) {
	if s, ok := d.serving[o.pool.Name]; ok {
		if before, _ := s.now(); !before.same(o) {
			d.log.Info("a resource has changed", "resource", o.pool.Name, "devices", len(o.devices), "healthy", o.healthy())
			for _, id := range slices.Sorted(maps.Keys(o.faults)) {
				if before.faults[id] != o.faults[id] {
					d.log.Warn("a device is unhealthy", "device", id, "resource", o.pool.Name, "fault", o.faults[id])
				}
			}
		}
		s.update(o)
		return
	}
	if len(o.devices) == 0 && len(o.pool.Devices) == 0 {
		d.log.Warn("no device is of a resource", "resource", o.pool.Name, "hint", "'podlace sriov explain' tells why")
	}
	ctx, stop := context.WithCancel(ctx)
	changed := make(chan struct{}, 1)
	d.wake[changed] = true
	s := &service{newRegistrar(newEndpoint(o.pool.Name, o, d.log, d.count, d.gate), d.Kubelet, changed), stop}
	d.serving[o.pool.Name] = s
	d.running.Go(func() {
		s.run(ctx)
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.wake, changed)
	})
}

// end stops a resource that is no more.
func (d *daemon) end(name string) {
	d.log.Info("a resource ends", "resource", name)
	d.serving[name].stop()
	delete(d.serving, name)
}

// socketsChanged wakes all registrars.
func (d *daemon) socketsChanged(string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.wake {
		notify(c)
	}
}

// notify wakes the goroutine that receives from c; that it was woken already is enough.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// forgetDevices deletes the device-info files of devices that no pod has; it is a no-op while nothing is known of pods. That is only safe
// before any are handed out: the kubelet tells of a pod's devices after it has been given them.
func (d *daemon) forgetDevices() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.asked && len(d.held) == 0 {
		return
	}
	pools, _ := byAPI(d.assign(d.env()))
	for _, p := range pools {
		var ids []string
		for _, h := range d.held {
			if h.Resource == p.Name {
				ids = append(ids, h.ID)
			}
		}
		if err := (files{info: d.InfoDir}).forget(p.Name, ids); err != nil {
			d.log.Warn("stale device-info files stay", "error", err)
		}
	}
}

// reload reads the configuration again if it is another, or if somebody asks for it, and reports whether there is a new one. One with
// errors is refused, and the present one stays.
func (d *daemon) reload(asked bool) bool {
	data, err := store.ReadFile(d.ConfigFile)
	if err == nil && !asked && bytes.Equal(data, d.text) {
		return false
	}
	var c *pool.Config
	if err == nil {
		c, err = pool.Parse(d.source(), data)
	}
	if err != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		if asked || d.refusal != err.Error() {
			d.log.Error("the configuration stays as it was", "error", err)
		}
		d.text, d.refusal = data, err.Error() // said once
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.config, d.text, d.refusal = c, data, ""
	d.log.Info("the configuration was read", "file", d.ConfigFile)
	d.logUnserved()
	return true
}

// logUnserved logs the entries of the configuration that are not supported.
func (d *daemon) logUnserved() {
	for _, p := range d.config.Unserved() {
		d.log.Error("an entry of the configuration is not served", "entry", p.Error(), "hint", "--strict refuses such a configuration")
	}
}

// source tells Parse what the configuration does not say.
func (o settings) source() pool.Source {
	return pool.Source{File: o.ConfigFile, Prefix: o.Prefix, Host: o.Host, Strict: o.Strict}
}

// grant tells how a resource is handed over. CDI is taken by itself where the node has specifications of others: whose runtime reads those
// reads ours.
func (d *daemon) grant(p pool.Pool) grant {
	f := files{d.InfoDir, d.CDIDir}
	mode := pool.CDIOff
	if p.Resource != nil {
		mode = p.Resource.CDI
	}
	switch {
	case d.CDIDir == "" || d.unpublished != nil:
		mode = pool.CDIOff
	case mode == pool.CDIAuto && d.UseCDI:
		mode = pool.CDIAnnotation
	case mode == pool.CDIAuto && f.hasCDI():
		mode = pool.CDIField
	case mode == pool.CDIAuto:
		mode = pool.CDIOff
	}
	return grant{mode, f}
}

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
	"golang.org/x/sync/singleflight"

	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/daemon/probes"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/store"
)

// listInterval is how often the kubelet is asked for the devices of pods.
const listInterval = 10 * time.Second

// daemon serves the SR-IOV resources of one node.
type daemon struct {
	daemonOptions
	log       *slog.Logger
	count     eventCounters
	health    *deviceHealth
	gate      *allocationGate      // locked before mu
	snapshots <-chan *pci.Snapshot // each differs from the one before
	records   chan struct{}        // receives when a claim was prepared or unprepared
	registry  *prometheus.Registry

	owners      singleflight.Group // shares the kubelet's list of pods between callers that wait for it
	ownersAsked time.Time          // when the last shared request began

	mu          sync.Mutex
	config      *pool.Config
	configText  []byte // content of the file that config was read from
	refusal     string // error of a newer configuration that was refused
	snapshot    *pci.Snapshot
	last        map[pci.Address]pci.Device // devices as they were when their interface was on the node
	findings    map[string]bool            // already logged
	faults      map[string]string          // reported faults of devices, by ID; already logged
	held        []poddevices.Device        // devices of pods, from the kubelet's last answer
	answered    bool                       // the kubelet has answered
	answeredBy  probes.SocketID            // kubelet socket that answered
	since       time.Time                  // when that socket was first seen
	listed      map[string]bool            // devices of pods in the answers of that socket
	counted     map[string]int             // devices that the kubelet counts as allocatable, by resource
	uplinks     []string                   // uplink interfaces, from the kernel's last answer
	envErr      error                      // why the kernel's last answer is missing
	inUse       map[string]string          // interfaces that the node itself uses, with the reason, from the same answer
	serving     map[string]*registeredService
	wake        map[chan<- struct{}]bool // channels that wake the registrars
	unpublished error                    // why the CDI specifications could not be written

	claimable    []*resourceOffer // resources of the API DRA
	driver       claimDriver      // DRA driver; nil until it starts
	driverFault  string           // why the driver cannot start
	unreadClaims error            // why the devices of claims are unknown
	damaged      error            // unreadable records of claims
	hasClaims    bool             // the folder for the records of claims exists
	running      sync.WaitGroup   // goroutines that serve, until their sockets are closed
	refreshed    bool             // serving is complete
}

// registeredService serves one resource that is registered with the kubelet.
type registeredService struct {
	*registrar
	stop context.CancelFunc
}

// refresh updates the resources and devices that the kubelet sees. It returns when to refresh next, or the zero time if only a change
// requires it.
func (d *daemon) refresh(ctx context.Context) (again time.Time) {
	d.gate.Lock() // no allocation may use the old offers
	defer d.gate.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mergeUnlisted()
	env := d.poolEnv()
	d.logFindings(env)
	all := d.assignPools(env)
	faults, again := d.health.update(time.Now(), d.snapshot, all, d.claimUse())
	d.logFaults(all, faultTexts(faults))
	pools, claimable := byAPI(all)
	d.updateDRA(ctx, claimable, faults)
	lost := map[string][]poddevices.Device{}
	for _, p := range pools {
		lost[p.Name] = d.lostDevices(p)
	}
	for _, name := range slices.Sorted(maps.Keys(d.serving)) {
		_, wanted := lost[name]
		leaving := slices.ContainsFunc(claimable, func(p pool.Pool) bool { return p.Name == name })
		if d.serving[name].setLeaving(leaving); wanted {
			continue
		}
		// A resource that left the configuration stays registered while pods have its devices.
		p := pool.Pool{Name: name}
		lost[name] = d.lostDevices(p)
		if len(lost[name]) == 0 && (!leaving || d.serving[name].isReady()) {
			d.stopResource(name)
			continue
		}
		pools = append(pools, p)
		if len(lost[name]) == 0 {
			again = time.Now().Add(checkInterval) // until the kubelet has registered the new options
		}
	}
	d.publishCDI(pools, lost)
	for _, p := range pools {
		d.updateOffer(ctx, newOffer(p, d.snapshot, d.grantFor(p), d.faults, lost[p.Name]))
	}
	if !d.refreshed && len(pools) == 0 && len(claimable) == 0 && !d.config.AnyDRA {
		d.log.Warn("the configuration has no resource for this node", "hint",
			"the sriov plugin refuses all pods with code 11 until a device plugin registers with the kubelet: remove sriov from this node's conflist")
	}
	d.refreshed = true
	return again
}

// publishCDI writes the CDI specifications of devices before they can be allocated. If it cannot, containers get the device files
// through the kubelet instead.
func (d *daemon) publishCDI(pools []pool.Pool, lost map[string][]poddevices.Device) {
	err := (deviceFolders{d.InfoDir, d.CDIDir}).publish(pools, lost)
	if err != nil && (d.unpublished == nil || err.Error() != d.unpublished.Error()) {
		d.log.Warn("could not write CDI specifications: device files are passed by the kubelet instead", "error", err)
	}
	d.unpublished = err
}

// logFindings logs each difference between the configuration and this node once.
func (d *daemon) logFindings(env pool.Env) {
	found := map[string]bool{}
	for _, p := range pool.Findings(d.config, d.snapshot, env) {
		found[p.Error()] = true
		if !d.findings[p.Error()] {
			d.log.Warn("the configuration does not fit this node", "finding", p.Error())
		}
	}
	d.findings = found
}

// logFaults logs the faults that are new or found at the start, each with all its devices.
func (d *daemon) logFaults(pools []pool.Pool, faults map[string]string) {
	found := map[[2]string][]string{}
	for _, p := range pools {
		for _, dev := range p.Devices {
			id := dev.Address.String()
			if text := faults[id]; text != "" && text != d.faults[id] {
				found[[2]string{p.Name, text}] = append(found[[2]string{p.Name, text}], id)
			}
		}
	}
	for of, ids := range found {
		d.log.Warn("devices are unhealthy, so no new pod gets them", "resource", of[0], "fault", of[1], "devices", ids)
	}
	d.faults = faults
}

// assignPools returns the pools of the configuration, without the devices that a pod still has through another resource or a claim,
// which a second pod could get otherwise. DRA pools keep theirs, because the DRA driver decides what it publishes.
func (d *daemon) assignPools(env pool.Env) []pool.Pool {
	from := map[string]string{}
	for _, h := range d.held {
		if from[h.ID] = h.Resource; h.Claim != nil {
			from[h.ID] = h.Claim.UID // the kubelet must not assign a claimed device to a container
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

// poolEnv returns the node's data, except the devices, from which the pools are computed. A device whose interface is in a pod has its
// last known properties.
func (d *daemon) poolEnv() pool.Env {
	host, err := kernel.Host()
	if err == nil {
		defer host.Close()
		var names []string
		var inUse map[string]string
		if names, err = host.Uplinks(); err == nil {
			inUse, err = host.InUse()
		}
		if err == nil {
			d.uplinks, d.inUse = names, inUse
		}
	}
	if d.envErr = err; err != nil {
		d.log.Warn("could not read the node's routes and addresses; using the last known ones", "error", err)
	}
	env := pool.Env{Last: d.last, DefaultRoute: d.uplinks, InUse: d.inUse}
	if d.answered { // by the kubelet
		env.Held = pool.HeldBy(slices.Values(d.held))
	}
	return env
}

// lostDevices returns, once each, the devices that pods have from a resource but that are missing in its pool. For a resource that left
// the configuration, it omits devices of claims.
func (d *daemon) lostDevices(p pool.Pool) (lost []poddevices.Device) {
	for _, h := range d.held {
		if h.Resource == p.Name && (p.Resource != nil || !byClaim(h)) && !poolContains(p, h.ID) {
			if s := d.serving[p.Name]; s != nil && len(h.NUMA) == 0 {
				before, _ := s.current()
				h.NUMA = before.numaNodes(h.ID)
			}
			lost = append(lost, h)
		}
	}
	slices.SortFunc(lost, func(a, b poddevices.Device) int { return strings.Compare(a.ID, b.ID) })
	return slices.CompactFunc(lost, func(a, b poddevices.Device) bool { return a.ID == b.ID })
}

func poolContains(p pool.Pool, id string) bool {
	return slices.ContainsFunc(p.Devices, func(dev pool.Device) bool { return dev.Address.String() == id })
}

// mergeUnlisted adds recently allocated devices and those of claims, which the kubelet's last list lacks.
func (d *daemon) mergeUnlisted() {
	d.held = mergeDevices(d.held, d.gate.allocations.recentDevices())
	records, err := d.gate.claims.List()
	if err != nil && (d.unreadClaims == nil || err.Error() != d.unreadClaims.Error()) {
		d.log.Error("the devices of claims are unknown: no device is changed until the records are readable", "error", err)
	}
	d.unreadClaims = err
	d.logDamaged(d.gate.claims.Damaged())
	if err == nil { // removes devices of unprepared claims
		d.held = slices.DeleteFunc(slices.Clone(d.held), byClaim)
	}
	for _, r := range records {
		devices := slices.DeleteFunc(slices.Clone(r.Devices), func(h poddevices.Device) bool { return h.Claim.Admin })
		for i := range devices {
			devices[i].Namespace, devices[i].Pod = r.Claim().Namespace, r.Pod()
		}
		d.held = mergeDevices(d.held, devices)
	}
}

// logDamaged logs the unreadable claim records whenever the error changes.
func (d *daemon) logDamaged(damaged error) {
	if damaged != nil && (d.damaged == nil || d.damaged.Error() != damaged.Error()) {
		d.log.Error("cannot read records of claims; these claims keep their devices", "error", damaged, "hint",
			"run the newer version that wrote the records, or delete them from "+d.Claims+": the daemon restores the records of claims in use")
	}
	d.damaged = damaged
}

// updateOffer passes the changed list of devices to the endpoint of a resource, which it starts if there is none.
func (d *daemon) updateOffer(ctx context.Context, o *resourceOffer) {
	if s, ok := d.serving[o.pool.Name]; ok {
		if before, _ := s.current(); !before.equalTo(o) {
			d.log.Info("a resource has changed", "resource", o.pool.Name, "devices", len(o.devices), "healthy", o.countHealthy())
		}
		s.update(o)
		return
	}
	if len(o.devices) == 0 && len(o.pool.Devices) == 0 {
		d.log.Warn("a resource has no devices", "resource", o.pool.Name, "hint", "run 'podlace sriov explain' for the reason")
	}
	ctx, stop := context.WithCancel(ctx)
	changed := make(chan struct{}, 1)
	d.wake[changed] = true
	s := &registeredService{newRegistrar(newEndpoint(o.pool.Name, o, d.log, d.count, d.gate), d.Kubelet, changed), stop}
	d.serving[o.pool.Name] = s
	d.running.Go(func() {
		s.run(ctx)
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.wake, changed)
	})
}

func (d *daemon) stopResource(name string) {
	d.log.Info("the resource is no longer served", "resource", name)
	d.serving[name].stop()
	delete(d.serving, name)
}

// socketsChanged wakes all registrars, so that they check their sockets at once.
func (d *daemon) socketsChanged(string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.wake {
		notify(c)
	}
}

// notify wakes the receiver of c without ever blocking. A pending wake-up is enough.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// reload reads the configuration if the file has changed, or always if `asked`, and reports whether a new one is in use. It logs the
// errors of a wrong one and keeps the current one.
func (d *daemon) reload(asked bool) bool {
	data, err := store.ReadFile(d.ConfigFile)
	if err == nil && !asked && bytes.Equal(data, d.configText) {
		return false
	}
	var c *pool.Config
	if err == nil {
		c, err = pool.Parse(d.poolSource(), data)
	}
	if err != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		if asked || d.refusal != err.Error() {
			d.log.Error("refused the new configuration; the current one remains in use", "error", err)
		}
		d.configText, d.refusal = data, err.Error() // logged once
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.config, d.configText, d.refusal = c, data, ""
	d.log.Info("the configuration was read", "file", d.ConfigFile)
	d.logUnserved()
	return true
}

func (d *daemon) logUnserved() {
	for _, p := range d.config.Unserved() {
		d.log.Error("a configuration entry is not supported, so its resource is not served", "entry", p.Error(), "hint", "use --strict to refuse such a configuration")
	}
}

// poolSource returns the configuration file's name and the defaults for keys that the file lacks.
func (o daemonOptions) poolSource() pool.Source {
	return pool.Source{File: o.ConfigFile, Prefix: o.Prefix, Host: o.Host, Strict: o.Strict}
}

// grantFor returns how containers get the devices of a resource. The default is CDI if another program has written CDI specifications
// on the node, because the runtime then also reads those of the daemon, or else the kubelet.
func (d *daemon) grantFor(p pool.Pool) deviceGrant {
	f := deviceFolders{d.InfoDir, d.CDIDir}
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
	return deviceGrant{mode, f}
}

// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/dra"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/daemon/probes"
	"github.com/podlace/podlace/pkg/pci"
	cni "github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/sriov"
)

// apiQPS and apiBurst limit the requests to the API server; each Prepare makes one. They are the kubelet's defaults, which suffice for 110
// pods. With client-go's 5 a second, 50 pods that start at once would wait for 8 seconds.
const (
	apiQPS   = 50
	apiBurst = 100
)

// claimDriver is the part of dra.Driver that the daemon uses.
type claimDriver interface {
	Run(context.Context)
	Update(dra.Inventory)
	Ready() string
	// Leads reports whether this instance of the daemon may change the devices of claims. During an update, an older and a newer one
	// may run at the same time.
	Leads() bool
	Published() map[string]poddevices.Published
}

func newDriver(o dra.Options) claimDriver { return dra.New(o) }

// byAPI splits the pools into those of the device plugin API and those of DRA.
func byAPI(pools []pool.Pool) (plain, claimed []pool.Pool) {
	for _, p := range pools {
		if p.Resource.API == pool.DRA {
			claimed = append(claimed, p)
		} else {
			plain = append(plain, p)
		}
	}
	return plain, claimed
}

// updateDRA passes the pools with the API DRA to the DRA driver. It starts the driver when the first such pool appears, or for claims
// of an earlier configuration, without ever waiting for the API server.
func (d *daemon) updateDRA(ctx context.Context, pools []pool.Pool, faults map[string]dra.Fault) {
	d.makeClaims()
	d.claimable = nil
	for _, p := range pools {
		d.claimable = append(d.claimable, newOffer(p, d.snapshot, deviceGrant{}, d.faults, nil))
	}
	if len(pools) == 0 && d.driver == nil && !slices.ContainsFunc(d.held, byClaim) {
		d.driverFault = ""
		return
	}
	isNew := d.driver == nil
	if isNew && !d.newDRA() {
		return
	}
	i := dra.Inventory{Snapshot: d.snapshot, Pools: pools, Taints: d.config.Taints, Held: map[string]string{}, Faults: faults,
		Last: maps.Clone(d.last)}
	for _, h := range d.held {
		if !byClaim(h) {
			i.Held[h.ID] = podText(h)
		}
	}
	for _, n := range d.snapshot.Nodes {
		i.Nodes = append(i.Nodes, n.ID)
	}
	driver := d.driver
	if driver.Update(i); isNew {
		d.running.Go(func() { driver.Run(ctx) })
	}
}

// claimUse returns the devices of claims, and those that pods have without one. Which driver is healthy depends on the owner.
func (d *daemon) claimUse() claimUsage {
	c := claimUsage{owned: map[string]bool{}, leaked: d.isLeaked, former: map[string]string{}, unrestored: map[string]string{}}
	journals, _ := sriov.Holdings() // restoreLoop logs the error
	for _, j := range journals {
		switch id := j.Address.String(); {
		case !j.Ended:
			c.former[id] = j.Former.Driver
		case !j.LimitsPending:
			c.unrestored[id] = cmp.Or(j.Unrestored, "its journal does not say why")
		}
	}
	for _, h := range d.held {
		c.owned[h.ID] = c.owned[h.ID] || byClaim(h)
	}
	return c
}

func byClaim(h poddevices.Device) bool { return h.Claim != nil }

// makeClaims creates the folder of claim records if the configuration has a resource with the API DRA. It tells plugin sriov that pods
// without devices are normal here even if the kubelet has no checkpoint. Nodes without a resource or access to the API server need it
// too, because all nodes usually have the same conflist.
func (d *daemon) makeClaims() {
	if d.hasClaims || !d.config.AnyDRA {
		return
	}
	err := claim.MakeFolder(d.Claims)
	if d.hasClaims = err == nil; err != nil {
		d.log.Warn("could not create the folder for the records of claims: claims cannot be prepared", "error", err)
	}
}

// newDRA creates the DRA driver. It returns false if there can be no client for the API server; the device plugin API works without.
func (d *daemon) newDRA() bool {
	client, err := d.newClient()
	if err != nil {
		if d.driverFault != err.Error() {
			d.log.Error("resources with \"api\": \"dra\" are not offered: no access to the API server; retrying", "error", err,
				"hint", "check --kubeconfig, or the ServiceAccount of the pod")
		}
		d.driverFault = err.Error()
		return false
	}
	d.driverFault = ""
	d.driver = d.NewDriver(dra.Options{
		Node: d.Host, Client: client, Kubelet: d.Root, Claims: d.Claims, Records: d.gate.claims, CDI: d.CDIDir, Instance: d.Instance,
		Sysfs: d.Sysfs, Log: d.log.With("api", string(pool.DRA)), Metrics: d.registry, Change: d.gate.runChange, InUse: d.whyUnavailable,
		Changed: func() { notify(d.records) },
	})
	return true
}

// newClient returns a client for the API server with the configured kubeconfig, or else the pod's ServiceAccount.
func (o daemonOptions) newClient() (kubernetes.Interface, error) {
	config, err := rest.InClusterConfig()
	if o.Kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", o.Kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("configure the client of the API server: %w", err)
	}
	config.QPS, config.Burst = apiQPS, apiBurst
	config.Wrap(probes.LimitAnswers)
	config.UserAgent = "podlace-sriov-device-plugin/" + cni.BuildVersion()
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("create the client of the API server: %w", err)
	}
	return client, nil
}

// publishedDevices returns what the ResourceSlices have about each device, by device ID.
func (d *daemon) publishedDevices() map[string]poddevices.Published {
	d.mu.Lock()
	driver := d.driver
	d.mu.Unlock()
	if driver == nil {
		return nil
	}
	return driver.Published()
}

// whyUnavailable returns why no claim can get the device with this ID, or "". It does not check whether another claim has it.
func (d *daemon) whyUnavailable(id string) string {
	address, err := pci.ParseAddress(id)
	d.mu.Lock()
	defer d.mu.Unlock()
	dev, ok := d.snapshot.Device(address)
	if err != nil || !ok {
		return "does not exist on this node"
	}
	return cmp.Or(d.ownerOf(dev, false), d.whyOnNode(dev))
}

// isLeaked reports whether a device's interface is in another network namespace, that is, not on the node although its driver has not
// changed.
func (d *daemon) isLeaked(dev pci.Device) bool {
	last, ok := d.last[dev.Address]
	return ok && last.Driver == dev.Driver && len(dev.Interfaces) == 0
}

// faultTexts returns the text of each fault by device ID.
func faultTexts(faults map[string]dra.Fault) map[string]string {
	out := map[string]string{}
	for id, f := range faults {
		out[id] = f.Text
	}
	return out
}

// unreadyDRA returns why pods cannot get devices through claims, or nil if they can or no resource has the API DRA.
func (d *daemon) unreadyDRA() error {
	switch {
	case d.driverFault != "":
		return errors.New("claims: " + d.driverFault)
	case d.driver != nil && d.driver.Ready() != "":
		return errors.New("claims: " + d.driver.Ready())
	}
	return nil
}

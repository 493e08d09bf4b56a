// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/dra"
	"github.com/podlace/podlace/pkg/pci"
	cni "github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/pool"
)

// retryDRA is how long after it could not start the driver starts again.
const retryDRA = 10 * time.Second

// claimDriver is what the daemon needs of a dra.Driver.
type claimDriver interface {
	Run(context.Context) error
	Update(dra.Inventory)
	Ready() string
	Published() map[string]allocation.Published
	// Leads reports whether this instance, not an older or newer one on the node, changes devices of claims.
	Leads() bool
}

func newDriver(o dra.Options) claimDriver { return dra.New(o) }

// byAPI splits pools by the API that gives them out.
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

// updateDRA tells the driver of pools that are given out by Dynamic Resource Allocation. The driver starts with the first one, or for
// claims that are left of an earlier configuration. Nothing in here waits for the API server.
func (d *daemon) updateDRA(ctx context.Context, pools []pool.Pool, faults map[string]dra.Fault) {
	d.claimable = nil
	for _, p := range pools {
		d.claimable = append(d.claimable, newOffer(p, d.snapshot, grant{}, texts(faults), nil))
	}
	if len(pools) == 0 && d.driver == nil && !slices.ContainsFunc(d.held, byClaim) {
		d.driverFault = ""
		return
	}
	if d.driver == nil && !d.startDRA(ctx) {
		return
	}
	i := dra.Inventory{Snapshot: d.snapshot, Pools: pools, Taints: d.config.Taints, Held: map[string]string{}, Faults: faults,
		Last: maps.Clone(d.last)}
	for _, h := range d.held {
		if !byClaim(h) {
			i.Held[h.ID] = fmt.Sprintf("pod %s/%s", h.Namespace, h.Pod)
		}
	}
	for _, n := range d.snapshot.Nodes {
		i.Nodes = append(i.Nodes, n.ID)
	}
	d.driver.Update(i)
}

// claims returns what the health of devices depends on besides the devices.
func (d *daemon) claims() claims {
	c := claims{have: map[string]bool{}, held: map[string]bool{}, leaked: d.leaked}
	for _, h := range d.held {
		if byClaim(h) {
			c.have[h.ID] = true
		} else {
			c.held[h.ID] = true
		}
	}
	return c
}

// byClaim reports whether a pod has a device by a claim.
func byClaim(h allocation.Device) bool { return h.Claim != nil }

// startDRA starts the driver, and reports whether it runs. Without a client there is none; the device plugin API goes on.
func (d *daemon) startDRA(ctx context.Context) bool {
	client, err := d.client()
	if err != nil {
		if d.driverFault != err.Error() {
			d.log.Error("resources with \"api\": \"dra\" are not given out: there is no way to the API server; it is tried again", "error", err,
				"hint", "--kubeconfig names a way")
		}
		d.driverFault = err.Error()
		return false
	}
	if err := claim.Begin(d.Claims); err != nil {
		d.log.Warn("claims may not be prepared", "error", err)
	}
	d.driverFault = ""
	d.driver = d.NewDriver(dra.Options{
		Node: d.Host, Client: client, Kubelet: d.Root, Claims: d.Claims, CDI: d.CDIDir, Instance: d.Instance, Sysfs: d.Sysfs,
		Log: d.log.With("api", string(pool.DRA)), Metrics: d.registry, Change: d.gate.change, InUse: d.usedOtherwise,
		Changed: func() { notify(d.records) },
	})
	driver := d.driver
	d.running.Go(func() { d.runDRA(ctx, driver) })
	return true
}

// runDRA runs the driver until ctx is done.
func (d *daemon) runDRA(ctx context.Context, driver claimDriver) {
	for {
		if err := driver.Run(ctx); err != nil && ctx.Err() == nil {
			d.log.Error("resources with \"api\": \"dra\" are not given out; it is tried again", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(retryDRA):
		}
	}
}

// client makes a client of the API server, of the kubeconfig or of the pod's ServiceAccount.
func (o settings) client() (kubernetes.Interface, error) {
	config, err := rest.InClusterConfig()
	if o.Kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", o.Kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("client of the API server: %w", err)
	}
	config.UserAgent = "podlace-sriov-device-plugin/" + cni.BuildVersion()
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("client of the API server: %w", err)
	}
	return client, nil
}

// published returns what ResourceSlices should say of devices, by ID.
func (d *daemon) published() map[string]allocation.Published {
	d.mu.Lock()
	driver := d.driver
	d.mu.Unlock()
	if driver == nil {
		return nil
	}
	return driver.Published()
}

// usedOtherwise returns why a claim cannot have a device, or it cannot be changed for one; "" if it can. Claims are not looked at.
func (d *daemon) usedOtherwise(id string) string {
	address, err := pci.ParseAddress(id)
	if err != nil {
		return err.Error()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mergeUnlisted()
	for _, h := range d.held {
		if h.ID == id && !byClaim(h) {
			return fmt.Sprintf("is of pod %s/%s", h.Namespace, h.Pod)
		}
	}
	dev, ok := d.snapshot.Device(address)
	switch {
	case !ok:
		return "is not there"
	case d.leaked(dev):
		return "has its interface in another namespace"
	}
	return d.uplink(dev)
}

// leaked reports whether the interface of a device that has its driver is in another network namespace.
func (d *daemon) leaked(dev pci.Device) bool {
	last, ok := d.last[dev.Address]
	return ok && last.Driver == dev.Driver && len(dev.Interfaces) == 0
}

// texts returns faults as people read them.
func texts(faults map[string]dra.Fault) map[string]string {
	out := map[string]string{}
	for id, f := range faults {
		out[id] = f.Text
	}
	return out
}

// unreadyDRA returns why pods cannot get devices by claims, "" if they can, or if no resource is given out so.
func (d *daemon) unreadyDRA() error {
	switch {
	case d.driverFault != "":
		return errors.New("claims: " + d.driverFault)
	case d.driver != nil && d.driver.Ready() != "":
		return errors.New("claims: " + d.driver.Ready())
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"slices"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/podlace/podlace/pkg/pci"
)

const (
	// healthEvery is the interval at which the driver reports the health of all prepared devices, even without a change.
	healthEvery = 10 * time.Second
	// healthLease is the time after which the kubelet discards a health report.
	healthLease = 30 * time.Second
)

// WatchHealthStatus reports the health of prepared devices until ctx is done: after each change, after each Prepare, and every
// healthEvery.
func (h callHandler) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	due := time.NewTicker(healthEvery)
	defer due.Stop()
	var sent []kubeletplugin.DeviceHealth
	for always := true; ; {
		i, news := h.watchInventory()
		now := h.healthOf(i)
		if always || !slices.Equal(now, sent) {
			stamped := slices.Clone(now)
			for i := range stamped {
				stamped[i].LastUpdated = time.Now()
			}
			select {
			case <-ctx.Done():
				return nil
			case reports <- kubeletplugin.DeviceHealthReport{Devices: stamped}:
				sent = now
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-news:
			always = false
		case <-due.C:
			always = true
		}
	}
}

// healthOf returns the health of all prepared devices on the node, without times.
func (d *Driver) healthOf(i Inventory) (list []kubeletplugin.DeviceHealth) {
	records, _ := d.records.List() // the daemon logs unreadable records
	seen := map[string]bool{}
	for _, r := range records {
		for _, dev := range r.Devices {
			if seen[dev.Claim.Device] {
				continue // another claim has administrative access to the device
			}
			seen[dev.Claim.Device] = true
			h := kubeletplugin.DeviceHealth{PoolName: dev.Claim.Pool, DeviceName: dev.Claim.Device, Health: kubeletplugin.HealthStatusHealthy,
				HealthCheckTimeout: healthLease}
			if why := i.whyUnhealthy(dev.ID); why != "" {
				h.Health, h.Message = kubeletplugin.HealthStatusUnhealthy, why
			}
			list = append(list, h)
		}
	}
	return list
}

// whyUnhealthy returns why a pod cannot use a device, or "".
func (i Inventory) whyUnhealthy(id string) string {
	if f, ok := i.Faults[id]; ok {
		return f.Text
	}
	if a, err := pci.ParseAddress(id); err == nil {
		if _, ok := i.Snapshot.Device(a); ok {
			return ""
		}
	}
	return "device " + id + " is missing"
}

// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/portmap"
	"github.com/podlace/podlace/pkg/sriov"
)

// addDescription adds what a plugin's record says. It skips unreadable state, which the plugin itself reports.
func (a *Attachment) addDescription(rec attachment.Record) {
	if a.Since.IsZero() || rec.Written.Before(a.Since) {
		a.Since = rec.Written
	}
	switch rec.Plugin {
	case "bridge":
		if h, err := bridge.Describe(rec); err == nil {
			a.Bridge, a.HostInterface = h.Bridge, h.Interface
			a.addMAC(h.MAC)
		}
	case "portmap":
		a.HostPorts, _ = portmap.Ports(rec)
	case "bandwidth":
		a.IngressRate, a.EgressRate, _ = bandwidth.Rates(rec)
	case "sriov":
		vfs, _ := sriov.VFs(rec)
		for _, v := range vfs {
			a.VFs = append(a.VFs, v.Address.String())
			a.addMAC(v.MAC)
		}
	}
}

func (a *Attachment) addMAC(mac string) {
	if mac != "" {
		a.MACs = append(a.MACs, mac)
	}
}

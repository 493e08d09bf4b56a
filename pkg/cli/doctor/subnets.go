// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/nodefile"
)

// changedSubnets reports bridges whose live pods have addresses in a subnet that the configuration no longer has, because ADD fails there
// with code 102.
func (n *node) changedSubnets() (found []Finding) {
	records, err := bridge.Gateways()
	if err != nil {
		return unknown("the records of bridge", err)
	}
	_, file, _ := nodefile.Read() // a node without podCIDRs is no error
	wanted := n.subnetsOfBridges(file.PodCIDRs)
	reported := map[string]bool{}
	for _, rec := range records {
		if pod := n.attachment(rec.Key); pod == nil || pod.State != reconcile.Alive {
			continue
		}
		for _, gw := range rec.Gateways {
			subnets, ok := wanted[rec.Bridge]
			at := rec.Bridge + " " + gw.String()
			if !ok || reported[at] || !refuses(gw, subnets) {
				continue
			}
			reported[at] = true
			found = append(found, Finding{Level: Error, Code: "subnet-changed",
				What:        "the subnet of " + rec.Bridge + " was changed while pods use the old one",
				Evidence:    fmt.Sprintf("%s has %s for %s; the configuration has %v", rec.Bridge, gw, rec.Pod, subnets),
				Consequence: "ADD of new pods fails with code 102",
				Command:     "delete the pods of the old subnet, which podlace ls lists, or restore the subnet in " + n.ConfDir})
		}
	}
	return found
}

// refuses reports whether ADD would fail because a live pod's gateway address conflicts with the configured subnets.
func refuses(gw netip.Prefix, subnets []netip.Prefix) bool {
	conflicts := func(s netip.Prefix) bool { return bridge.GatewaysConflict(s, gw) }
	return !slices.Contains(subnets, gw.Masked()) && slices.ContainsFunc(subnets, conflicts)
}

// subnetsOfBridges returns the configured subnets of each bridge, without bridges with forceAddress, where ADD replaces conflicting
// addresses.
func (n *node) subnetsOfBridges(podCIDRs []netip.Prefix) map[string][]netip.Prefix {
	all, forced := map[string][]netip.Prefix{}, map[string]bool{}
	for _, net := range n.ownNetworks() {
		config := net.Plugin("bridge")
		var keys struct {
			ForceAddress bool `json:"forceAddress"`
		}
		if config == nil || json.Unmarshal(config, &keys) != nil {
			continue
		}
		name := bridge.NameIn(config)
		forced[name] = forced[name] || keys.ForceAddress
		for _, subnet := range hostlocal.Subnets(config, podCIDRs) {
			all[name] = append(all[name], subnet.Masked())
		}
	}
	for name := range forced {
		if forced[name] {
			delete(all, name)
		}
	}
	return all
}

func (n *node) attachment(key attachment.Key) *reconcile.Attachment {
	for _, a := range n.attachments {
		if a.Key() == key {
			return a
		}
	}
	return nil
}

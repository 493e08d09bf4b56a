// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/podlace/podlace/integration/claimtest"
	"github.com/podlace/podlace/integration/harness/card"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/poddevices"
)

const (
	claims = 256 // on the node, of which one is the measured pod's

	podWithClaim = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=claimed-0;K8S_POD_UID="
)

func podOfClaim(i int) string { return fmt.Sprintf("1c3d9b0f-6e1f-4f6f-9e1d-%012d", i) }

// writeClaims writes the records of claims and the kubelet's dra_manager_state with the same claims. Claim 0 gets the second VF.
func writeClaims(kubelet string) error {
	var noted []claimtest.Claim
	for i := range claims {
		name, uid := fmt.Sprint("vf-", i), fmt.Sprintf("2d4ea1c0-7f20-4a70-8f2e-%012d", i)
		id := fmt.Sprintf("0000:99:%02x.%d", i/8, i%8)
		if i == 0 {
			id = card.Address(1)
		}
		device := poddevices.Device{Resource: card.Resource, ID: id, Claim: &poddevices.Claim{UID: uid, Namespace: "shop", Name: name,
			Request: "vf", Pool: "node", Device: strings.NewReplacer(":", "-", ".", "-").Replace(id)}}
		r := claim.Record{State: claim.Prepared, Writer: "bench", Devices: []poddevices.Device{device},
			Reserved: []claim.Consumer{{Resource: "pods", Name: "claimed", UID: podOfClaim(i)}}}
		if err := claim.Write(claim.Folder, r); err != nil {
			return err
		}
		noted = append(noted, claimtest.Claim{UID: uid, Namespace: "shop", Name: name, Pods: []string{podOfClaim(i)}})
	}
	return claimtest.WriteState(kubelet, noted...)
}

// measureClaim compares a pod whose VF is from a ResourceClaim with one whose VF is from the device plugin API.
func (n nodes) measureClaim(r *report, o options) error {
	pods := []string{podWithVF, podWithClaim + podOfClaim(0)}
	entries := make([]*contenderEntry, len(pods))
	for i, args := range pods {
		c, err := n.chainOf(fmt.Sprint("sriov-claim-", i), "node-sriov", pluginSet{sideOurs, o.plugins})
		if err != nil {
			return err
		}
		c.plugins = []pluginConf{afterOthers("sriov", c.pod)}
		entries[i] = newEntry(sideOurs, lookupContender{c, args})
	}
	runRounds([]*contenderEntry{entries[0], entries[1]}, 2*o.rounds)
	for i, e := range entries {
		if e.err != nil {
			return fmt.Errorf("pod %s: %w", pods[i], e.err)
		}
	}
	for _, verb := range []string{verbAdd, verbCheck, verbDel} {
		plain := p50(entries[0].samples[verb].chain)
		f := figure{Value: p50(entries[1].samples[verb].chain) - plain}
		what := fmt.Sprintf("pod with one VF by one of %d claims: sriov %s above the %.1f ms with the device plugin", claims, verb, plain)
		r.addLoad(what, 0, map[string]figure{sideOurs: f})
	}
	return nil
}

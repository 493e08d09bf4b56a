// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/cli/reconcile"
)

const (
	// checkBudget is the maximum duration of the check "pods", which could take long on a node with many pods.
	checkBudget = 10 * time.Second
	// maxPodFindings is the maximum number of different errors that the check "pods" reports.
	maxPodFindings = 10
)

// The regular expression `down` matches CHECK's error about a bridge or a host side that is down.
var down = regexp.MustCompile(`: (?:bridge )?([^\s,]+)(?:, the host side of [^\s,]+,)? is down$`)

// The check "pods" reports live pods whose CHECK fails, for example because a link is down or an address, a route or a rule is missing. The
// check "pods" runs after the check "status", because STATUS restores flushed rules of all pods.
func (n *node) pods() []Finding { return n.podsWithin(checkBudget) }

func (n *node) podsWithin(budget time.Duration) (found []Finding) {
	if alive, err := n.livePods(); err != nil {
		return unknown("the records and leases", err)
	} else if alive == 0 {
		return skipped("no pod lives here")
	}
	checked, left, failed := reconcile.CheckAll(n.attachments, n.BinDir, budget)
	if left > 0 {
		found = skipped(fmt.Sprintf("CHECK ran for %d of %d pods in %s; 'podlace trace POD' checks another pod", checked, checked+left, budget))
	} else if checked == 0 {
		return skipped("no runtime's record of an ADD was found in /var/lib/cni/results")
	}
	pods := map[string]int{}
	var first []reconcile.FailedCheck
	for _, f := range failed {
		if strings.Contains(f.Err.Error(), " is not a port of ") {
			continue // the check "ports" reports this port
		}
		if pods[f.Err.Error()]++; pods[f.Err.Error()] == 1 {
			first = append(first, f)
		}
	}
	for _, f := range first[:min(len(first), maxPodFindings)] {
		name := cmp.Or(f.Pod, f.ContainerID)
		finding := Finding{Level: Error, Code: checkFailed, What: fmt.Sprintf("CHECK of %s fails for pods: %d", f.Plugin, pods[f.Err.Error()]),
			Evidence:    fmt.Sprintf("%v; for example pod %s", f.Err, name),
			Consequence: "these pods lack a part of their network, which no restart of the runtime restores",
			Command:     fmt.Sprintf("podlace reload; podlace trace %s; delete the pod if CHECK still fails", name)}
		if m := down.FindStringSubmatch(f.Err.Error()); m != nil {
			finding.Consequence = "these pods have no network"
			finding.Command = fmt.Sprintf("ip link set %s up; podlace reload", m[1]) // the link lost its IPv6 addresses
		}
		found = append(found, finding)
	}
	return found
}

// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/pkg/cli/chain"
	"github.com/podlace/podlace/pkg/cli/reconcile"
)

const (
	// checkBudget bounds the check "pods", which could take long with many pods.
	checkBudget = 10 * time.Second
	// checkTimeout bounds CHECK of one pod.
	checkTimeout = 10 * time.Second
	// maxPodFindings is how many different errors the check "pods" reports.
	maxPodFindings = 10
)

// down matches CHECK's error about a bridge or a host side that is down.
var down = regexp.MustCompile(`: (?:bridge )?([^\s,]+)(?:, the host side of [^\s,]+,)? is down$`)

// pods reports live pods whose CHECK fails, for example because a link is down or an address, a route or a rule is missing. It runs after
// the check "status", because STATUS restores flushed rules of all pods.
func (n *node) pods() []Finding { return n.podsWithin(checkBudget) }

func (n *node) podsWithin(budget time.Duration) (found []Finding) {
	if n.attachmentsErr != nil {
		return unknown("the records and leases", n.attachmentsErr)
	}
	if len(n.attachmentsIn(reconcile.Alive)) == 0 {
		return skipped("no pod lives here")
	}
	checked, left, failed := n.checkPods(budget)
	if left > 0 {
		found = skipped(fmt.Sprintf("CHECK ran for %d of %d pods in %s; 'podlace trace POD' checks another pod", checked, checked+left, budget))
	} else if checked == 0 {
		return skipped("no live pod has a record of its ADD in /var/lib/cni/results whose configuration allows CHECK")
	}
	pods := map[string]int{}
	var first []failedCheck
	for _, f := range failed {
		if strings.Contains(f.why, " is not a port of ") {
			continue // the check "ports" reports this port
		}
		if pods[f.why]++; pods[f.why] == 1 {
			first = append(first, f)
		}
	}
	for _, f := range first[:min(len(first), maxPodFindings)] {
		finding := Finding{Level: Error, Code: "check-failed", What: fmt.Sprintf("CHECK of %s fails for pods: %d", f.plugin, pods[f.why]),
			Evidence:    fmt.Sprintf("%s; for example pod %s", f.why, f.pod),
			Consequence: "these pods lack a part of their network, which no restart of the runtime restores",
			Command:     fmt.Sprintf("podlace reload; podlace trace %s; delete the pod if CHECK still fails", f.pod)}
		if m := down.FindStringSubmatch(f.why); m != nil {
			finding.Consequence = "these pods have no network"
			finding.Command = fmt.Sprintf("ip link set %s up; podlace reload", m[1]) // the link lost its IPv6 addresses
		}
		found = append(found, finding)
	}
	return found
}

// failedCheck is the first plugin of a pod whose CHECK fails.
type failedCheck struct{ pod, plugin, why string }

// checkPods runs CHECK of Podlace's plugins for live pods in libcni's cache within the budget, and counts the pods with and without one.
func (n *node) checkPods(budget time.Duration) (checked, left int, failed []failedCheck) {
	ours := map[string]bool{}
	isOurs := func(name string) bool {
		if _, known := ours[name]; !known {
			_, err := reconcile.Version(filepath.Join(n.BinDir, name))
			ours[name] = err == nil
		}
		return ours[name]
	}
	start := time.Now()
	for _, a := range n.attachments {
		switch {
		case a.State != reconcile.Alive || !a.Cached || !n.isOwn(a.Network):
			continue
		case time.Since(start) >= budget:
			left++
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), checkTimeout)
		recorded := chain.Recorded{Plugins: n.BinDir, Cache: filepath.Dir(reconcile.CacheDir),
			Network: a.Network, ContainerID: a.ContainerID, IfName: a.IfName, Netns: a.Netns}
		why := failedCheck{pod: cmp.Or(a.Pod, a.ContainerID)}
		err := recorded.Check(ctx, isOurs, func(c chain.Call) {
			if c.Err != nil && why.plugin == "" {
				why.plugin, why.why = c.Plugin, failureOf(c.Err)
			}
		})
		cancel()
		if err == nil {
			checked++
		}
		if why.plugin != "" {
			failed = append(failed, why)
		}
	}
	return checked, left, failed
}

// failureOf returns the code and the message of a plugin's error, without the details that differ from pod to pod.
func failureOf(err error) string {
	if refusal, ok := errors.AsType[*types.Error](err); ok {
		return reconcile.Refusal{Code: refusal.Code, Msg: refusal.Msg}.Error()
	}
	return err.Error()
}

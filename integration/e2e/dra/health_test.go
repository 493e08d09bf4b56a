// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/podlace/podlace/integration/pcitest"
)

// TestLinkDown: the VFs of a PF without a carrier get a taint. New pods get VFs of the other PF, and running pods keep theirs.
func TestLinkDown(t *testing.T) {
	needGate(t, "DRADeviceTaints")
	l := newLab(t, setup{})
	l.template("vf", "nic")
	l.template("two", "a", "b", "c", "d")
	l.pod("old", "nic=+vf")
	l.runs("old")
	old := l.allocated(l.claimOf("old", "nic"))
	pf, name := l.pfOf(old[0]), map[string]string{pf0: pf0Name, pf1: pf1Name}[l.pfOf(old[0])]
	l.carrier(pf, name, false)
	took := within(t, "the VFs are tainted", func() error { return l.tainted(pf, true) })
	t.Logf("the taint is in the API after %.1f s", took.Seconds())
	l.pod("new", "nic=+two") // four VFs, as many as the other PF has
	l.runs("new")
	for _, id := range l.allocated(l.claimOf("new", "nic")) {
		if l.pfOf(id) == pf {
			t.Errorf("VF %s of the PF without carrier was allocated", id)
		}
	}
	l.pod("late", "nic=+vf")
	l.event("late", "cannot allocate all claims")
	l.attached("old", old...)
	l.carrier(pf, name, true)
	took = within(t, "no VF is tainted", func() error { return l.tainted(pf, false) })
	t.Logf("the taint is gone from the API after %.1f s", took.Seconds())
	l.runs("late")
}

// TestTaintsDropped: with the feature gate for device taints off, the API server drops taints of slices. When a PF has no carrier, the
// daemon then removes its free VFs from the slice and keeps the allocated ones.
func TestTaintsDropped(t *testing.T) {
	l := newLab(t, setup{})
	if hasGate("DRADeviceTaints") {
		gates := "DRADeviceTaints=false"
		if hasGate("DRADeviceTaintRules") { // Kubernetes 1.34 does not have this gate
			gates += ",DRADeviceTaintRules=false"
		}
		l.gateOff(gates)
	}
	l.template("vf", "nic")
	l.pod("old", "nic=+vf")
	l.runs("old")
	old := l.allocated(l.claimOf("old", "nic"))
	want := []string{}
	for _, id := range l.ids {
		if l.pfOf(id) != l.pfOf(old[0]) || id == old[0] {
			want = append(want, id)
		}
	}
	pf := l.pfOf(old[0])
	l.carrier(pf, map[string]string{pf0: pf0Name, pf1: pf1Name}[pf], false)
	took := within(t, "the free VFs have left the slice", func() error { return l.offers(want...) })
	t.Logf("the free VFs have left the slice after %.1f s", took.Seconds())
	if err := l.tainted(pf, false); err != nil {
		t.Error(err)
	}
	l.carrier(pf, map[string]string{pf0: pf0Name, pf1: pf1Name}[pf], true)
	within(t, "all VFs are back", func() error { return l.offers(l.ids...) })
	l.attached("old", old...)
}

// TestEviction: a running pod whose VF disappears is evicted after its toleration time, which a restart of the daemon does not extend. The
// VF leaves the slice as soon as no claim has it.
func TestEviction(t *testing.T) {
	needGate(t, "DRADeviceTaints")
	l := newLab(t, setup{})
	l.claim("vf", "nic")
	const seconds = 15
	l.create(fmt.Sprintf(`
kind: ResourceClaim
metadata: {name: patient}
spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: %s, tolerations: [
  {key: sriov.podlace.io/gone, operator: Exists, effect: NoExecute, tolerationSeconds: %d}]}}]}}`, l.class(), seconds))
	l.pod("web", "nic=vf")
	l.pod("patient", "nic=patient")
	l.runs("web")
	l.runs("patient")
	gone := append(l.allocated("vf"), l.allocated("patient")...)
	for _, id := range gone {
		pcitest.Remove(t, l.sysfs, id)
	}
	isGone := func(id string) (when time.Time, err error) {
		for _, taint := range l.devices()[deviceName(id)].Taints {
			if taint.Key == driverName+"/gone" && taint.Effect == resourceapi.DeviceTaintEffectNoExecute {
				return taint.TimeAdded.Time, nil
			}
		}
		return when, fmt.Errorf("device %s has the taints %+v", id, l.devices()[deviceName(id)].Taints)
	}
	var since time.Time
	took := within(t, "the VF has its taint", func() (err error) {
		since, err = isGone(gone[1])
		return err
	})
	t.Logf("the taint is in the API after %.1f s", took.Seconds())
	l.gone("web")
	l.restart(9)
	if now, err := isGone(gone[1]); err != nil || !now.Equal(since) {
		t.Errorf("the taint has the time %v, %v: want %v", now, err, since)
	}
	p, err := l.getPod("patient")
	if err != nil || p.DeletionTimestamp != nil {
		t.Errorf("the pod that tolerates the taint for %d s is going: %v", seconds, err)
	}
	l.gone("patient")
	t.Logf("the pod that tolerates the taint for %d s is gone %.1f s after the taint came", seconds, time.Since(since).Seconds())
	var left []string
	for _, id := range l.ids {
		if !slices.Contains(gone, id) {
			left = append(left, id)
		}
	}
	within(t, "the VFs are gone from the slices", func() error { return l.offers(left...) })
	for _, id := range gone {
		delete(l.before, id)
	}
}

// TestTaintRule: a DeviceTaintRule for a device or the node's pool evicts pods, whose VFs return to the node.
func TestTaintRule(t *testing.T) {
	needGate(t, "DRADeviceTaintRules")
	l := newLab(t, setup{})
	l.template("vf", "nic")
	l.pod("one", "nic=+vf")
	l.pod("two", "nic=+vf")
	l.runs("one")
	l.runs("two")
	one, two := l.allocated(l.claimOf("one", "nic")), l.allocated(l.claimOf("two", "nic"))
	rule := func(name, selector string) {
		l.create(`
kind: DeviceTaintRule
metadata: {name: ` + l.ns + `-` + name + `}
spec:
  deviceSelector: {driver: sriov.podlace.io, ` + selector + `}
  taint: {key: example.com/broken, value: "yes", effect: NoExecute}`)
	}
	rule("device", "pool: "+nodeName+", device: "+deviceName(one[0]))
	l.gone("one")
	within(t, "the VF is home", func() error {
		if slices.Contains(journals(), one[0]) {
			return errors.New("there is a journal")
		}
		return nil
	})
	l.attached("two", two...)
	rule("node", "pool: "+nodeName)
	l.gone("two")
	l.pod("late", "nic=+vf")
	l.event("late", "cannot allocate all claims")
}

// TestHealth: a pod's status reports its VF as unhealthy while the PF has no carrier.
func TestHealth(t *testing.T) {
	needGate(t, "ResourceHealthStatus")
	l := newLab(t, setup{})
	l.claim("vf", "nic")
	l.create(`
kind: Pod
metadata: {name: web}
spec:
  resourceClaims: [{name: nic, resourceClaimName: vf}]
  containers: [{resources: {claims: [{name: nic}]}}]
`)
	l.runs("web")
	pf := l.pfOf(l.allocated("vf")[0])
	becomes := func(want core.ResourceHealthStatus) {
		t.Helper()
		took := within(t, "the VF is "+string(want), func() error {
			p, err := l.getPod("web")
			if err != nil {
				return err
			}
			return healthIs(p, want)
		})
		t.Logf("%s after %.1f s", want, took.Seconds())
	}
	becomes(core.ResourceHealthStatusHealthy)
	l.carrier(pf, map[string]string{pf0: pf0Name, pf1: pf1Name}[pf], false)
	becomes(core.ResourceHealthStatusUnhealthy)
	l.carrier(pf, map[string]string{pf0: pf0Name, pf1: pf1Name}[pf], true)
	becomes(core.ResourceHealthStatusHealthy)
}

// healthIs returns an error unless the pod's status has this health for its only device.
func healthIs(p *core.Pod, want core.ResourceHealthStatus) error {
	var all []string
	for _, c := range p.Status.ContainerStatuses {
		for _, r := range c.AllocatedResourcesStatus {
			for _, d := range r.Resources {
				all = append(all, string(d.Health))
			}
		}
	}
	if len(all) != 1 || all[0] != string(want) {
		return fmt.Errorf("it is %v", all)
	}
	return nil
}

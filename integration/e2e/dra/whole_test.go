// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/kernel"
)

// The configuration "whole" offers the VFs of both PFs, and also offers one PF as a single device.
const whole = `{"resourceList": [{"resourceName": "fast", "resourcePrefix": "example.com", "api": "dra",
		"selectors": [{"vendors": ["8086"], "devices": ["1889"]}, {"pciAddresses": ["` + pf1 + `"]}]}],
	"pfs": [{"pfName": "` + pf1Name + `", "numVfs": 4, "offerWhole": true}]}`

// kindTemplate creates a template for the whole PF or for one of its VFs.
func (l *lab) kindTemplate(kind string) {
	l.Helper()
	l.create(`
kind: ResourceClaimTemplate
metadata: {name: ` + kind + `}
spec: {spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: ` + l.class() + `, selectors: [{cel: {expression:
  'device.attributes["sriov.podlace.io"].pf == "` + pf1Name + `" && device.attributes["sriov.podlace.io"].kind == "` + kind + `"'}}]}}]}}}`)
}

// TestWholePF: a pod has a whole PF or some of its VFs, never both. The PF has no VFs while a pod has it, and has them again afterwards.
func TestWholePF(t *testing.T) {
	needGate(t, "DRAPartitionableDevices")
	l := prepare(t, setup{config: whole})
	pcitest.Kernel{VFDriver: "iavf"}.Start(t, l.sysfs)
	mac := l.addPF(pf1Name)
	l.run()
	l.ready()
	within(t, "the PF is in a slice, with its counters", func() error {
		d, ok := l.devices()[deviceName(pf1)]
		if !ok || text(d, "kind") != "pf" || len(d.ConsumesCounters) == 0 {
			return fmt.Errorf("%+v", d)
		}
		return nil
	})
	l.kindTemplate("pf")
	l.kindTemplate("vf")
	l.pod("one", "nic=+vf")
	l.runs("one")
	l.pod("all", "nic=+pf")
	l.event("all", "cannot allocate all claims")
	l.delete("one")
	l.runs("all")
	if got := l.inside("all")["net1"].MAC; got != mac {
		t.Errorf("pod all has %+v: want the PF with MAC %s", l.inside("all"), mac)
	}
	vfs := func() (n int) {
		links, _ := filepath.Glob(filepath.Join(pcitest.Folder(t, l.sysfs, pf1), "virtfn*"))
		return len(links)
	}
	if n := vfs(); n != 0 {
		t.Errorf("the PF that a pod has whole has %d VFs", n)
	}
	l.pod("late", "nic=+vf")
	l.event("late", "cannot allocate all claims")
	l.delete("all")
	within(t, "the PF has its VFs again", func() error {
		if n := vfs(); n != 4 {
			return fmt.Errorf("it has %d", n)
		}
		return nil
	})
	for i, id := range l.ids[4:] { // the veths existed all the time
		pcitest.Set(t, l.sysfs, id, fmt.Sprintf("net/%sv%d/type", pf1Name, i), "1")
	}
	l.runs("late")
	l.attached("late", l.allocated(l.claimOf("late", "nic"))...)
	if l.inside("late")["net1"].MAC == mac {
		t.Error("pod late has the PF")
	}
}

// addPF creates a veth for a PF, and returns its MAC.
func (l *lab) addPF(name string) (mac string) {
	l.Helper()
	host, err := kernel.Host()
	if err != nil {
		l.Fatal(err)
	}
	defer host.Close()
	if _, err := host.AddVeth(kernel.Veth{Host: name, Pod: name + "peer"}); err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { _ = exec.Command("ip", "link", "delete", name+"peer").Run() })
	all, err := interfaces("")
	if err != nil {
		l.Fatal(err)
	}
	for _, i := range all {
		if i.Name == name {
			return i.MAC
		}
	}
	l.Fatalf("there is no %s", name)
	return ""
}

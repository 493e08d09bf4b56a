// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
)

// TestFault checks that each reason why a pod cannot use a device has its own text.
func TestFault(t *testing.T) {
	pf, _ := pci.ParseAddress("0000:0f:00.0")
	whole := pci.Device{Address: pf, Interfaces: []string{"ens1f0"}, Carrier: true, Driver: "ice"}
	vf := vfPool(1).Devices[0].Device
	vf.PF = pf
	for want, change := range map[string]func(d, pf *pci.Device, driver *string){
		"":                       func(_, _ *pci.Device, _ *string) {},
		"numa_node: I/O error":   func(d, _ *pci.Device, _ *string) { d.Unreadable = "numa_node: I/O error" },
		"no driver is bound":     func(d, _ *pci.Device, _ *string) { d.Driver = "" },
		"iavf, not vfio-pci":     func(_, _ *pci.Device, driver *string) { *driver = "vfio-pci" },
		"link of ens1f0 is down": func(_, p *pci.Device, _ *string) { p.Carrier = false },
		"its PF 0000:0f:00.0: x": func(_, p *pci.Device, _ *string) { p.Unreadable = "x" },
		"PF 0000:0f:00.0 is missing": func(_, p *pci.Device, _ *string) {
			p.Address, _ = pci.ParseAddress("0000:0e:00.0")
		},
	} {
		d, p, driver := vf, whole, ""
		change(&d, &p, &driver)
		got := deviceFault(&pci.Snapshot{Devices: []pci.Device{p, d}}, driver, pool.Device{Device: d}).Text
		if !strings.Contains(got, want) || (got == "") != (want == "") {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	lone := pci.Device{Driver: "iavf", Interfaces: []string{"ens5"}} // without a PF, so its link is down on the node
	if got := deviceFault(&pci.Snapshot{Devices: []pci.Device{lone}}, "", pool.Device{Device: lone}); !isHealthy(got) {
		t.Errorf("without a PF: %v", got)
	}
	capable := whole
	capable.SRIOV = true
	for d, want := range map[*pci.Device]string{&vf: "its driver is iavf, not vfio-pci",
		&capable: "its driver is ice, not vfio-pci; the daemon does not change the driver of a PF"} {
		if got := deviceFault(&pci.Snapshot{Devices: []pci.Device{whole, vf}}, "vfio-pci", pool.Device{Device: *d}).Text; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	noInterface := whole // a PF bound to VFIO
	noInterface.Interfaces, noInterface.Carrier = nil, false
	if got := deviceFault(&pci.Snapshot{Devices: []pci.Device{noInterface, vf}}, "", pool.Device{Device: vf}); !isHealthy(got) {
		t.Errorf("got %v", got)
	}
}

// TestFaultOfPort: a PF with several ports is judged by the port that the selector names, and otherwise by all of them.
func TestFaultOfPort(t *testing.T) {
	vf := vfPool(1).Devices[0]
	vf.PF, _ = pci.ParseAddress("0000:0f:00.0")
	pf := pci.Device{Address: vf.PF, Interfaces: []string{"ens1p0", "ens1p1"}, Carrier: true, Down: []string{"ens1p1"}}
	for port, want := range map[string]string{"": "", "ens1p0": "", "ens1p1": "the link of ens1p1 is down"} {
		vf.Port = port
		if got := deviceFault(&pci.Snapshot{Devices: []pci.Device{pf}}, "", vf).Text; got != want {
			t.Errorf("%q: got %q, want %q", port, got, want)
		}
	}
	vf.Port, pf.Carrier, pf.Down = "", false, pf.Interfaces
	if got := deviceFault(&pci.Snapshot{Devices: []pci.Device{pf}}, "", vf).Text; got != "the link of ens1p0, ens1p1 is down" {
		t.Errorf("got %q", got)
	}
}

// TestJudge checks that a short fault is not reported, and a lasting one and its end after the right delays.
func TestJudge(t *testing.T) {
	p := vfPool(1)
	p.Resource = &pool.Resource{}
	id, start := p.Devices[0].Address.String(), time.Unix(1e9, 0)
	h := newHealth(nodeFiles{})
	at := func(after time.Duration, driver string, errors uint64) (string, time.Duration) {
		p.Devices[0].Driver, p.Devices[0].Errors = driver, errors
		faults, again := h.update(start.Add(after), &pci.Snapshot{}, []pool.Pool{p}, claimUsage{})
		if again.IsZero() {
			return faults[id].Text, 0
		}
		return faults[id].Text, again.Sub(start)
	}
	p.Devices[0].PF = pci.Address{}
	const s = time.Second
	for i, step := range []struct {
		at     time.Duration
		driver string
		errors uint64
		bad    bool
		again  time.Duration
	}{
		{0, "", 5, true, 0},                // a fault of a new device is reported at once
		{1 * s, "iavf", 5, true, 11 * s},   // without fault from now on
		{5 * s, "", 5, true, 0},            // faulty again
		{6 * s, "iavf", 5, true, 16 * s},   //
		{16 * s, "iavf", 5, false, 0},      // without fault for long enough
		{20 * s, "", 5, false, 23 * s},     //
		{22 * s, "iavf", 5, false, 0},      // recovered in time
		{30 * s, "", 5, false, 33 * s},     //
		{33 * s, "", 5, true, 0},           //
		{34 * s, "iavf", 5, true, 44 * s},  //
		{44 * s, "iavf", 5, false, 0},      //
		{50 * s, "iavf", 6, true, 110 * s}, // a PCI error is reported at once
		{80 * s, "iavf", 7, true, 140 * s}, // a further error extends the time
		{140 * s, "iavf", 7, true, 150 * s},
		{150 * s, "iavf", 7, false, 0},
		{160 * s, "iavf", 3, false, 0}, // the card was replaced
	} {
		if fault, again := at(step.at, step.driver, step.errors); (fault != "") != step.bad || again != step.again {
			t.Errorf("step %d: %q, again at %s, want %+v", i, fault, again, step)
		}
	}
}

// TestOwnDriver: a pod's VF is healthy with the driver of the pod's conflist, and unhealthy with it after the pod.
func TestOwnDriver(t *testing.T) {
	p := vfPool(1)
	p.Resource.Driver, p.Devices[0].Driver = "iavf", "vfio-pci"
	id := p.Devices[0].Address.String()
	s := &pci.Snapshot{Devices: []pci.Device{{Address: p.Devices[0].PF}}}
	for _, held := range []bool{true, false} {
		by := claimUsage{}
		if held {
			by.former = map[string]string{id: "iavf"}
		}
		if found := newHealth(nodeFiles{}).faultOf(s, p.Resource, p.Devices[0], by); isHealthy(found) != held {
			t.Errorf("in a pod %t: %+v", held, found)
		}
	}
}

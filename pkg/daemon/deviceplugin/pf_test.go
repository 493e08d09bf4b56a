// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/pcitest"
)

// driverOf returns the driver of a PCI function, or "" if no driver is bound.
func driverOf(t *testing.T, sysfs, address string) string {
	t.Helper()
	target, err := os.Readlink(filepath.Join(pcitest.Folder(t, sysfs, address), "driver"))
	if errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Base(target)
}

// barePF returns a machine with a PF that supports 8 VFs but has no VFs.
func barePF(t *testing.T) (sysfs string) {
	t.Helper()
	sysfs = pcitest.Generate(t, pcitest.Machine{Nodes: 1, PFs: 1})
	pcitest.Set(t, sysfs, pf0, "sriov_totalvfs", "8")
	return sysfs
}

// TestPFKeepsItsDriver creates VFs after the start of the daemon, which must offer them but not the PF, and leave the PF's driver
// alone. The VFs are then removed and created again.
func TestPFKeepsItsDriver(t *testing.T) {
	for name, selectors := range map[string]string{"pfNames": `{"pfNames": ["ens0f0"]}`, "vendors": `{"vendors": ["8086"]}`, "none": `{}`,
		"pciAddresses": `{"pciAddresses": ["` + pf0 + `", "` + vf00 + `", "` + vf01 + `"]}`} {
		t.Run(name, func(t *testing.T) {
			sysfs := barePF(t)
			pcitest.Kernel{VFDriver: "vfio-pci"}.Start(t, sysfs)
			l := newLab(t, sysfs, `{"resourceList": [{"resourceName": "dpdk", "driver": "vfio-pci", "selectors": `+selectors+`}]}`)
			for range 2 {
				l.awaitDevices("example.com/dpdk")
				pcitest.Set(t, sysfs, pf0, "sriov_numvfs", "2")
				l.awaitDevices("example.com/dpdk", vf00, vf01)
				if driver := driverOf(t, sysfs, pf0); driver != "ice" {
					t.Errorf("driver of the PF: %s", driver)
				}
				pcitest.Set(t, sysfs, pf0, "sriov_numvfs", "0")
			}
			l.awaitDevices("example.com/dpdk")
			for line := range strings.Lines(l.log.String()) {
				if strings.Contains(line, "another driver") && strings.Contains(line, pf0) {
					t.Error(line)
				}
			}
		})
	}
}

// TestOfferPF checks that a PF with offerPf is offered and keeps its driver, and that no VFs are created on it while a pod has it.
func TestOfferPF(t *testing.T) {
	sysfs := barePF(t)
	pcitest.Kernel{VFDriver: "iavf"}.Start(t, sysfs)
	resource := `"resourceList": [{"resourceName": "whole", "selectors": {"pfNames": ["ens0f0"]}`
	l := newLab(t, sysfs, `{`+resource+`}], "pfs": [{"pfName": "ens0f0", "numVfs": 0, "offerPf": true}]}`)
	l.awaitDevices("example.com/whole", pf0)
	l.kubelet.assignDevices("shop", "web-0", "app", "example.com/whole", pf0)
	l.hup()
	l.await("/metrics", `podlace_sriov_vf_allocated{bdf="`+pf0)
	l.configure(`{` + resource + `}], "pfs": [{"pfName": "ens0f0", "numVfs": 2}]}`)
	l.awaitLog("could not configure a device as requested", pf0+": cannot create 2 VFs", "belongs to pod shop/web-0")
	l.awaitDevices("example.com/whole", pf0+"!")
	l.configure(`{` + resource + `, "driver": "vfio-pci"}], "pfs": [{"pfName": "ens0f0", "numVfs": 0, "offerPf": true}]}`)
	l.kubelet.release()
	l.hup()
	l.awaitLog("could not configure a device as requested", pf0, "is no VF")
	l.awaitDevices("example.com/whole", pf0+"!")
	if driver := driverOf(t, sysfs, pf0); driver != "ice" {
		t.Errorf("driver of the PF: %s", driver)
	}
}

// TestNICPFKeepsItsDriver creates the VFs of a real card after the start of the daemon, which must bind them to vfio-pci and leave the
// PF's driver alone.
func TestNICPFKeepsItsDriver(t *testing.T) {
	pf := kerneltest.RealPF(t)
	nic := kerneltest.RealNIC(t, 0)
	driver := driverOf(t, "/sys", pf)
	l := newLab(t, "/sys", `{"resourceList": [{"resourceName": "dpdk", "driver": "vfio-pci", "selectors": {"pfNames": ["`+nic.PF+`"]}}]}`)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(l.log)
		}
		kerneltest.SetNumVFs(t, pf, 0)
	})
	for range 2 {
		l.awaitDevices("example.com/dpdk")
		kerneltest.SetNumVFs(t, pf, 2)
		l.kubelet.await("example.com/dpdk", "two VFs", func(p *registeredPlugin) bool { return len(p.devices) == 2 && p.devices[pf] == nil })
		for i := range 2 {
			target, err := os.Readlink("/sys/bus/pci/devices/" + pf + "/virtfn" + strconv.Itoa(i))
			if err != nil {
				t.Fatal(err)
			}
			vf := filepath.Base(target)
			kerneltest.Await(t, vf+" has VFIO", func() bool { return driverOf(t, "/sys", vf) == "vfio-pci" })
		}
		if now := driverOf(t, "/sys", pf); now != driver {
			t.Errorf("the PF had driver %s and has %s", driver, now)
		}
		kerneltest.SetNumVFs(t, pf, 0)
	}
}

// TestNumVFsContradicted has VFs although sriov_numvfs is 0. With "numVfs": 0, the daemon must keep them and log the contradiction
// once, but no change.
func TestNumVFsContradicted(t *testing.T) {
	sysfs := twoPFs(t)
	if err := os.WriteFile(filepath.Join(pcitest.Folder(t, sysfs, pf0), "sriov_numvfs"), []byte("0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l := newLab(t, sysfs, `{"resourceList": [], "pfs": [{"pfName": "ens0f0", "numVfs": 0}]}`)
	l.awaitLog("could not configure a device as requested", "give "+pf0+" 0 VFs: sriov_numvfs is 0 but 2 VFs exist")
	for range 3 {
		l.hup()
	}
	l.await("/healthz", "ok")
	if n := strings.Count(l.log.String(), "sriov_numvfs is 0"); n != 1 {
		t.Errorf("logged %d times", n)
	}
	if strings.Contains(l.log.String(), "another number of VFs") {
		t.Error(l.log)
	}
}

// TestDriverLoadedLater checks that a driver that is loaded after the first attempt is bound at the next scan, without the long pause
// that follows a failed bind.
func TestDriverLoadedLater(t *testing.T) {
	sysfs := twoPFs(t)
	folder := filepath.Join(sysfs, "bus/pci/drivers/vfio-pci")
	if err := os.Remove(folder); err != nil {
		t.Fatal(err)
	}
	pcitest.Kernel{}.Start(t, sysfs)
	l := newLab(t, sysfs, `{"resourceList": [{"resourceName": "dpdk", "driver": "vfio-pci", "selectors": {"pfNames": ["ens0f0"]}}]}`)
	l.awaitLog("could not configure a device as requested", vf00, "the driver is not loaded")
	l.awaitLog("could not configure a device as requested", vf01, "the driver is not loaded")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	l.hup()
	kerneltest.Await(t, "the VFs have VFIO", func() bool {
		return driverOf(t, sysfs, vf00) == "vfio-pci" && driverOf(t, sysfs, vf01) == "vfio-pci"
	})
}

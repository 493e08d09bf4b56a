// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/daemon/dra"
	"github.com/podlace/podlace/pkg/pci"
)

func numVFs(t *testing.T, sysfs string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(sysfs, "bus/pci/devices", pf0, "sriov_numvfs"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(data))
}

func (l *testLab) awaitNumVFs(sysfs, want string) {
	l.Helper()
	for until := time.Now().Add(maxWait); numVFs(l.T, sysfs) != want; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(until) {
			l.Fatalf("%s VFs, want %s\n%s", numVFs(l.T, sysfs), want, l.log)
		}
	}
}

// TestFollower checks that an instance that does not lead changes no number of VFs, binds no driver and restores no VF.
func TestFollower(t *testing.T) {
	sysfs := pcitest.Generate(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2})
	pcitest.Kernel{VFDriver: "iavf"}.Start(t, sysfs)
	l := prepareLab(t, sysfs, `{"pfs": [{"pfName": "ens0f0", "numVfs": 1}], "resourceList": [{"resourceName": "one", "api": "dra", "driver": "vfio-pci"}]}`)
	r := l.useRecorder()
	r.follows = true
	var returns atomic.Int32
	l.RestoreVFs = func() error { returns.Add(1); return nil }
	l.Poll = time.Second
	l.kubelet.start()
	l.kubelet.assignDevices("shop", "web-9", "app", "example.com/other", "")
	l.start()
	l.awaitInventory(r, "one: "+vf00+"!other-driver "+vf01+"!other-driver")
	time.Sleep(100 * time.Millisecond)
	if n, driver := numVFs(t, sysfs), driverOf(t, sysfs, vf00); n != "2" || driver != "iavf" || returns.Load() != 0 {
		t.Errorf("%s VFs, driver %s, %d calls to bring VFs back", n, driver, returns.Load())
	}
	r.mu.Lock()
	r.follows = false
	r.mu.Unlock()
	r.options.Changed()
	l.awaitNumVFs(sysfs, "1")
	for until := time.Now().Add(maxWait); returns.Load() == 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("no VF is restored")
		}
	}
}

// TestDeviceLocked checks that a PF's number of VFs stays while another instance changes one of them.
func TestDeviceLocked(t *testing.T) {
	sysfs := pcitest.Generate(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2})
	pcitest.Kernel{VFDriver: "iavf"}.Start(t, sysfs)
	l := prepareLab(t, sysfs, `{"pfs": [{"pfName": "ens0f0", "numVfs": 1}], "resourceList": [{"resourceName": "one"}]}`)
	vf, err := pci.ParseAddress(vf01)
	if err != nil {
		t.Fatal(err)
	}
	unlock, err := dra.LockDevices(l.Claims, []pci.Address{vf})
	if err != nil {
		t.Fatal(err)
	}
	l.kubelet.start()
	l.kubelet.assignDevices("shop", "web-9", "app", "example.com/other", "")
	l.start()
	l.awaitDevices("example.com/one", vf00, vf01)
	time.Sleep(100 * time.Millisecond)
	if n := numVFs(t, sysfs); n != "2" {
		t.Errorf("%s VFs", n)
	}
	unlock()
	l.awaitNumVFs(sysfs, "1")
}

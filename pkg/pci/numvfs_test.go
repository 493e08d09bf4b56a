// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/pcitest"
)

const firstPF = "0000:11:00.0" // of a pcitest.Machine

func TestSetNumVFs(t *testing.T) {
	sysfs := pcitest.Generate(t, pcitest.Machine{Nodes: 1, PFs: 2, VFs: 4})
	pcitest.Kernel{VFDriver: "iavf"}.Start(t, sysfs)
	pf, before := address(t, firstPF), mustScan(t, sysfs)
	must(t, SetNumVFs(t.Context(), sysfs, pf, 4))
	if c := differences(before, mustScan(t, sysfs)); len(c) > 0 {
		t.Errorf("it has 4: %v", c)
	}
	for _, n := range []int{4, 2, 3, 0, 0, 4} { // the fake kernel refuses a change from 2 to 3 without 0 in between
		must(t, SetNumVFs(t.Context(), sysfs, pf, n))
		s := mustScan(t, sysfs)
		if d, _ := s.Device(pf); d.NumVFs != n || len(s.VFs(pf)) != n || len(s.Devices) != 2+n+4 {
			t.Errorf("%d VFs: %+v, %d VFs, %d devices", n, d, len(s.VFs(pf)), len(s.Devices))
		}
	}
}

func TestSetNumVFsRefused(t *testing.T) {
	sysfs := pcitest.Generate(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 4})
	before := mustScan(t, sysfs)
	for _, n := range []int{5, -1} {
		if err := SetNumVFs(t.Context(), sysfs, address(t, firstPF), n); err == nil ||
			!strings.HasSuffix(err.Error(), "VFs: it can have 0 to 4") {
			t.Errorf("%d VFs: %v", n, err)
		}
	}
	vf := before.VFs(address(t, firstPF))[0]
	if err := SetNumVFs(t.Context(), sysfs, vf.Address, 1); err == nil || !strings.Contains(err.Error(), "it is no PF") {
		t.Errorf("of a VF: %v", err)
	}
	if err := SetNumVFs(t.Context(), sysfs, address(t, "0000:ff:00.0"), 1); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of nothing: %v", err)
	}
	if c := differences(before, mustScan(t, sysfs)); len(c) > 0 {
		t.Error(c)
	}
}

// TestSetNumVFsFails checks that SetNumVFs waits for a kernel that does not react until the context ends, and then reports the current
// number of VFs.
func TestSetNumVFsFails(t *testing.T) {
	sysfs := pcitest.Generate(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 4})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := SetNumVFs(ctx, sysfs, address(t, firstPF), 2); !errors.Is(err, context.DeadlineExceeded) ||
		!strings.Contains(err.Error(), "give 0000:11:00.0 2 VFs: wait for 0 VFs, have 4: ") {
		t.Error(err)
	}
	must(t, os.WriteFile(filepath.Join(pcitest.Folder(t, sysfs, firstPF), "sriov_numvfs"), []byte("many\n"), 0o600))
	if err := SetNumVFs(t.Context(), sysfs, address(t, firstPF), 2); err == nil ||
		!strings.Contains(err.Error(), `sriov_numvfs: want a number from 0, have "many"`) {
		t.Error(err)
	}
}

// TestNumVFsContradicted checks that SetNumVFs changes nothing if the PF has more VFs than sriov_numvfs says.
func TestNumVFsContradicted(t *testing.T) {
	sysfs := pcitest.Generate(t, pcitest.Machine{Nodes: 1, PFs: 1, VFs: 2})
	must(t, os.WriteFile(filepath.Join(pcitest.Folder(t, sysfs, firstPF), "sriov_numvfs"), []byte("0\n"), 0o600))
	before := mustScan(t, sysfs)
	if err := SetNumVFs(t.Context(), sysfs, address(t, firstPF), 0); err == nil ||
		err.Error() != "give "+firstPF+" 0 VFs: sriov_numvfs is 0 but 2 VFs exist" {
		t.Error(err)
	}
	if c := differences(before, mustScan(t, sysfs)); len(c) > 0 {
		t.Error(c)
	}
}

// TestLife creates VFs, binds one to vfio-pci and back, and removes them all: in a fake sysfs, and also on the PF whose address is in
// PODLACE_PF (such as 0000:21:00.0), which no other program may use meanwhile.
func TestLife(t *testing.T) {
	t.Run("tree", func(t *testing.T) {
		sysfs := pcitest.Generate(t, pcitest.Machine{Nodes: 2, PFs: 1, VFs: 4})
		pcitest.Kernel{VFDriver: "iavf"}.Start(t, sysfs)
		life(t, sysfs, address(t, firstPF))
	})
	if real := os.Getenv("PODLACE_PF"); real != "" {
		t.Run(real, func(t *testing.T) { life(t, Sysfs, address(t, real)) })
	}
}

func life(t *testing.T, sysfs string, pf Address) {
	t.Cleanup(func() { must(t, SetNumVFs(context.WithoutCancel(t.Context()), sysfs, pf, 0)) })
	must(t, SetNumVFs(t.Context(), sysfs, pf, 0), SetNumVFs(t.Context(), sysfs, pf, 2))
	s := mustScan(t, sysfs)
	vfs := s.VFs(pf)
	if len(vfs) != 2 || vfs[0].VFIndex != 0 || vfs[1].VFIndex != 1 || vfs[0].Driver == "" {
		t.Fatalf("VFs: %+v", vfs)
	}
	vf := vfs[1]
	must(t, Bind(t.Context(), sysfs, vf.Address, "vfio-pci"))
	d, _ := mustScan(t, sysfs).Device(vf.Address)
	if d.Driver != "vfio-pci" || d.VFIndex != 1 || d.PF != pf || len(d.Interfaces) > 0 || d.IOMMUGroup == Unknown || d.Unreadable != "" {
		t.Errorf("with VFIO: %+v", d)
	}
	if err := Bind(t.Context(), sysfs, vf.Address, "no-such-driver"); err == nil {
		t.Error("a driver that is not there has it")
	}
	must(t, Bind(t.Context(), sysfs, vf.Address, ""), Bind(t.Context(), sysfs, vf.Address, vf.Driver))
	if got := driverState(t, sysfs, vf.Address.String()); got != vf.Driver+"," {
		t.Errorf("back: %s", got)
	}
	if err := SetNumVFs(t.Context(), sysfs, pf, 100000); err == nil {
		t.Error("it has 100000 VFs")
	}
}

// SPDX-License-Identifier: Apache-2.0

package pci_test

import (
	"testing"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/pci"
)

// TestReadBrief checks that Read skips files that no pod needs, and slow ones, during whose read the kernel locks all interfaces.
func TestReadBrief(t *testing.T) {
	sysfs := pcitest.Generate(t, pcitest.Machine{PFs: 1, VFs: 2})
	a, err := pci.ParseAddress("0000:11:02.1")
	if err != nil {
		t.Fatal(err)
	}
	d, pf, err := pci.Read(sysfs, a)
	if err != nil || !d.IsVF() || d.LinkType != pci.Ether || len(d.Interfaces) != 1 || len(pf.Interfaces) != 1 || d.PF != pf.Address {
		t.Errorf("%+v, %+v, %v", d, pf, err)
	}
	if d.Driver == "" || d.VFIndex != 1 {
		t.Errorf("%+v", d)
	}
	if d.Vendor != "" || pf.NumVFs != 0 || d.Carrier || pf.Carrier {
		t.Errorf("read needlessly: %+v, %+v", d, pf)
	}
}

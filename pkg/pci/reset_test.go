// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/pcitest"
)

// TestResetFunction checks that only a function without a driver is reset.
func TestResetFunction(t *testing.T) {
	sysfs := withFakeKernel(t, pcitest.Kernel{})
	refused := func(a, says string) {
		t.Helper()
		if err := ResetFunction(t.Context(), sysfs, address(t, a)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", a, err, says)
		}
	}
	pcitest.Set(t, sysfs, byKernel, "reset", "")
	refused(byKernel, "it has the driver iavf: unbind it first")
	refused(byNobody, "the kernel has no method to reset it")
	refused("0000:77:00.0", "is not there")

	pcitest.Set(t, sysfs, byNobody, "reset", "")
	must(t, ResetFunction(t.Context(), sysfs, address(t, byNobody)))
	file := filepath.Join(pcitest.Folder(t, sysfs, byNobody), "reset")
	if data, err := os.ReadFile(file); string(data) != "1\n" {
		t.Errorf("written: %q, %v", data, err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/pcitest"
)

// TestGroupRenumbered checks that the next container gets an IOMMU group's new number, through the device plugin API and CDI.
func TestGroupRenumbered(t *testing.T) {
	sysfs, folder := twoPFs(t), t.TempDir()
	pcitest.Kernel{}.Start(t, sysfs)
	link := filepath.Join(pcitest.Folder(t, sysfs, vf00), "iommu_group")
	for _, group := range []string{"", "4711"} {
		if group != "" {
			at := filepath.Join(sysfs, "kernel/iommu_groups", group)
			to, err := filepath.Rel(filepath.Dir(link), at)
			if err = errors.Join(err, os.Mkdir(at, 0o755), os.Remove(link), os.Symlink(to, link)); err != nil {
				t.Fatal(err)
			}
		}
		target, err := os.Readlink(link)
		if err != nil {
			t.Fatal(err)
		}
		l := prepareLab(t, sysfs, `{"resourceList": [{"resourceName": "dpdk", "driver": "vfio-pci", "selectors": {"pfNames": ["ens0f0"]}}]}`)
		l.CDIDir, l.UseCDI = folder, true
		l.kubelet.start()
		stop := l.start()
		p := l.awaitDevices("example.com/dpdk", vf00, vf01)
		answer, err := p.client.Allocate(t.Context(), allocating(vf00))
		if err != nil {
			t.Fatal(err)
		}
		want := "/dev/vfio/" + filepath.Base(target)
		env := answer.GetContainerResponses()[0].GetEnvs()
		if !strings.Contains(fmt.Sprint(env), `"`+want+`"`) {
			t.Errorf("variables %q, want %s", env, want)
		}
		spec, err := os.ReadFile(filepath.Join(l.CDIDir, cdiFile("example.com/dpdk")))
		if err != nil || !strings.Contains(string(spec), `"`+want+`"`) {
			t.Errorf("CDI %s, %v, want %s", spec, err, want)
		}
		stop()
	}
}

// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/kernel"
)

// TestUplinkWithoutPF checks that the daemon neither offers nor binds the node's interface, whichever API the configuration names, although
// it has no address for a moment.
func TestUplinkWithoutPF(t *testing.T) {
	for _, api := range []string{"device-plugin", "dra"} {
		t.Run(api, func(t *testing.T) {
			sysfs := twoPFs(t)
			pcitest.Passthrough(t, sysfs, vf00)
			pcitest.Set(t, sysfs, pf0, "sriov_numvfs", "1")
			pcitest.Kernel{}.Start(t, sysfs)
			kerneltest.Must(t, os.MkdirAll(filepath.Join(pcitest.Folder(t, sysfs, vf00), "net", "ens0f0v0"), 0o755))
			host, err := kernel.Host()
			kerneltest.Must(t, err)
			defer host.Close()
			uplink, err := host.AddVeth(kernel.Veth{Host: "ens0f0v0", Pod: "peer", MTU: 1500})
			kerneltest.Must(t, err, host.SetUp(kernel.Link{Index: uplink, Name: "ens0f0v0"}))
			defer func() { kerneltest.Must(t, host.DelLink("ens0f0v0")) }()
			l := prepareLab(t, sysfs, fmt.Sprintf(`{"resourceList": [{"resourceName": "one", "api": %q, "driver": "vfio-pci",
				"selectors": {"pciAddresses": [%q]}}]}`, api, vf00))
			r := l.useRecorder()
			l.kubelet.start()
			l.kubelet.assignDevices("shop", "web-9", "app", "example.com/other", "")
			l.start()
			time.Sleep(2 * time.Second)
			if _, got := r.formatInventory(); strings.Contains(fmt.Sprint(got), vf00) {
				t.Errorf("the inventory is %v", got)
			}
			if driver, err := os.Readlink(filepath.Join(pcitest.Folder(t, sysfs, vf00), "driver")); err != nil || filepath.Base(driver) != "iavf" {
				t.Errorf("the uplink has driver %s, %v", driver, err)
			}
		})
	}
}

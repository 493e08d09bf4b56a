// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"fmt"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/yamlfile"
)

// TestSettingsWithoutPF: with the devices of a node, a configuration whose settings the node's functions cannot have is reported, in a
// network at its key and in a resource as 'podlace sriov explain' says it.
func TestSettingsWithoutPF(t *testing.T) {
	const vf = "0000:11:02.0"
	inConflist := strings.NewReplacer("linkState", "link_state", "minTxRate", "min_tx_rate", "maxTxRate", "max_tx_rate")
	sysfs := pcitest.Generate(t, pcitest.Machine{PFs: 1, VFs: 1})
	problems := func(data string) string {
		devices, err := pci.Scan(sysfs)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(Files([]yamlfile.File{{Name: "f", Data: []byte(data)}}, Node{Devices: devices}))
	}
	const network = `{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"sriov","resources":["a/r"],"vlan":100,"ifName":"net{index}"}]}`
	if got := problems(network); got != "[]" {
		t.Errorf("with a PF: %s", got)
	}
	pcitest.Passthrough(t, sysfs, vf)
	pcitest.Remove(t, sysfs, "0000:11:00.0")
	for _, s := range pcitest.SettingsWithoutPF() {
		for driver, key := range map[string]string{"": s.Interface, `"driver":"vfio-pci",`: s.Userspace} {
			want := "[]"
			if key != "" {
				want = "plugins[0]." + inConflist.Replace(key) + ": warning: the functions of this node have no PF on it, which alone can set it: " +
					"remove the setting, and set it on the hypervisor [needs-pf]]"
			}
			settings := strings.Replace(inConflist.Replace(s.JSON), `, "ifName": "fast"`, "", 1)
			got := problems(strings.Replace(network, `"vlan":100`, driver+settings, 1))
			if !strings.HasSuffix(got, want) || strings.Count(got, "warning") != strings.Count(want, "warning") {
				t.Errorf("network, %s, %s: %s, want %s", s.JSON, driver, got, want)
			}
			if strings.Contains(s.JSON, `"mac"`) { // a resource cannot set it
				continue
			}
			got = problems(fmt.Sprintf(`{"resourceList":[{"resourceName":"r","api":"dra",%s"vf":{%s},"selectors":{"pciAddresses":[%q]}}]}`, driver, s.JSON, vf))
			if key == "" && got != "[]" || key != "" && !strings.Contains(got, "matches; "+vf+": it has no PF, which alone can set "+key) {
				t.Errorf("resource, %s, %s: %s", s.JSON, driver, got)
			}
		}
	}
}

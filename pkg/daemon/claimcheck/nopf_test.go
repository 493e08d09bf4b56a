// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/pcitest"
)

// TestSettingsWithoutPF checks by devices of the node that claims cannot have settings of VFs if the device is a function without a PF or a
// whole PF. If the scheduler may choose another device, the class must exclude it.
func TestSettingsWithoutPF(t *testing.T) {
	const config = `{"resourceList": [{"resourceName": "fast", "api": "dra", "selectors": [%s],
		"claimMay": ["vlan", "vlanQoS", "vlanProto", "mac", "spoofchk", "trust", "linkState", "minTxRate", "maxTxRate", "mtu", "ifName"]}],
		"pfs": [{"pfName": "ens0f0", "numVfs": 2, "offerWhole": true}]}`
	const pf, vf = `{"pciAddresses": ["0000:11:00.0"]}`, `{"pciAddresses": ["0000:11:02.0"]}`
	const setting = "spec.devices.config[0].opaque.parameters.KEY: "
	for _, c := range []struct {
		selectors, driver string
		passthrough       bool
		says              []string // of the setting KEY
	}{
		{vf, "iavf", true, []string{setting, "the allocated function of example.com/fast has no PF on its node, which alone can set it: set it on the hypervisor\n"}},
		{vf, "vfio-pci", true, []string{setting, "the allocated function of example.com/fast has no PF on its node, which alone can set it: set it on the hypervisor\n"}},
		{pf, "iavf", false, []string{setting, "the allocated function of example.com/fast is a PF, and only VFs have this setting: select kind == \"vf\"\n"}},
		{pf + "," + vf, "iavf", false, []string{"1 of 2 matching devices are no VFs with a PF on the node, which alone can set KEY ",
			": add the selector device.attributes[\"sriov.podlace.io\"].kind == \"vf\"\n"}},
	} {
		sysfs := pcitest.Generate(t, pcitest.Machine{PFs: 1, VFs: 2, Driver: c.driver})
		if c.passthrough {
			pcitest.Passthrough(t, sysfs, "0000:11:02.0")
		}
		for _, s := range pcitest.SettingsWithoutPF() {
			key := map[string]string{"iavf": s.Interface, "vfio-pci": s.Userspace}[c.driver]
			dir := pcitest.WriteFiles(t, map[string]string{"config.json": fmt.Sprintf(config, c.selectors),
				"m.yaml": claimOf(oneVF + "    config:\n" + parameters("", s.JSON))})
			status, stdout, stderr := run("check-claim", filepath.Join(dir, "m.yaml"), "--config-file", filepath.Join(dir, "config.json"),
				"--resource-prefix", "example.com", "--sysfs", sysfs, "--node-name", "node-1")
			wrong := (status == 0) != (key == "") || key != "" && strings.Count(stderr, "\n") != 1
			for _, says := range c.says {
				wrong = wrong || key != "" && !strings.Contains(stderr, strings.Replace(says, "KEY", key, 1))
			}
			if wrong {
				t.Errorf("%s, %s, %s: status %d, %s%s", c.selectors, c.driver, s.JSON, status, stdout, stderr)
			}
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/pcitest"
)

// TestSettingsWithoutPF checks that claims cannot have settings that a node without the PF cannot give them, by devices of the node.
func TestSettingsWithoutPF(t *testing.T) {
	const config = `{"resourceList": [{"resourceName": "fast", "api": "dra", "selectors": {"vendors": ["8086"], "devices": ["1889"]},
		"claimMay": ["vlan", "vlanQoS", "vlanProto", "mac", "spoofchk", "trust", "linkState", "minTxRate", "maxTxRate", "mtu", "ifName"]}]}`
	const vf = "0000:11:02.0"
	for _, driver := range []string{"iavf", "vfio-pci"} {
		sysfs := pcitest.Generate(t, pcitest.Machine{PFs: 1, VFs: 1, Driver: driver})
		pcitest.Passthrough(t, sysfs, vf)
		for _, s := range pcitest.SettingsWithoutPF() {
			key := map[string]string{"iavf": s.Interface, "vfio-pci": s.Userspace}[driver]
			dir := pcitest.WriteFiles(t, map[string]string{"config.json": config,
				"m.yaml": claimOf(oneVF + "    config:\n" + parameters("", s.JSON))})
			status, stdout, stderr := run("check-claim", filepath.Join(dir, "m.yaml"), "--config-file", filepath.Join(dir, "config.json"),
				"--resource-prefix", "example.com", "--sysfs", sysfs, "--node-name", "node-1")
			says := "spec.devices.config[0].opaque.parameters." + key + ": "
			if (status == 0) != (key == "") || key != "" && (!strings.Contains(stderr, says) ||
				!strings.Contains(stderr, "the allocated function of example.com/fast has no PF on its node, which alone can set it: set it on the hypervisor\n") || strings.Count(stderr, "\n") != 1) {
				t.Errorf("%s, %s: status %d, %s%s", driver, s.JSON, status, stdout, stderr)
			}
		}
	}
}

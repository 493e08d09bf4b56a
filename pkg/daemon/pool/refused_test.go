// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/pci"
)

// TestRefused: what the plugin sriov refuses, and RDMA devices that pods cannot use, are reported once for each cause, and each refused
// device says so. They are offered, because other plugins can attach them.
func TestRefused(t *testing.T) {
	const (
		infiniBand  = "setting the GUID and the partition keys of an InfiniBand VF is not supported"
		remedy      = `: attach such VFs with ib-sriov under Multus, or offer only "linkTypes": ["ether"]`
		switchdev   = "PF 0000:18:00.0 is in switchdev mode, in which the packets of its VFs end at representors on the node"
		toLegacy    = ": run 'devlink dev eswitch set pci/0000:18:00.0 mode legacy', or attach the VFs with ovs-cni under Multus"
		onlyOnNode  = "pods cannot use the RDMA devices, which stay on the node in exclusive mode of the RDMA subsystem: write 'options ib_core netns_mode=1' into /etc/modprobe.d and reboot, or move them with rdma-cni under Multus"
		offered     = " offered: meets resourceList[0].selectors"
		refuses     = "; the plugin sriov refuses it: "
		ib, ibVFIO  = "0000:5e:00.1", "0000:5e:00.2"
		inSwitchdev = `{"pfNames":["ens2f0np0"]}`
	)
	for name, test := range map[string]struct {
		archive, selectors string
		exclusive          bool
		findings           []string
		explained          []string
	}{
		"legacy": {"rdma", `{"linkTypes":["ether"],"vendors":["15b3"]}`, false, nil, []string{"0000:a1:00.2" + offered, "0000:a1:00.3" + offered}},
		"switchdev": {"switchdev", inSwitchdev, false,
			[]string{"resourceList[0]: resource intel.com/x: the plugin sriov refuses 2 devices, first 0000:18:00.2: " + switchdev + toLegacy},
			[]string{"0000:18:00.2" + offered + refuses + switchdev, "0000:18:00.3" + offered + refuses + switchdev}},
		"InfiniBand": {"infiniband", `{"vendors":["15b3"]}`, false,
			[]string{"resourceList[0]: resource intel.com/x: the plugin sriov refuses 2 devices, first " + ib + ": " + infiniBand + remedy},
			[]string{ib + offered + refuses + infiniBand, ibVFIO + offered + refuses + infiniBand}},
		"InfiniBand by its name": {"infiniband", `{"linkTypes":["infiniband"],"drivers":["vfio-pci"]}`, false,
			[]string{"resourceList[0].selectors.linkTypes: the plugin sriov refuses these VFs: " + infiniBand + remedy},
			[]string{ibVFIO + offered + refuses + infiniBand}},
		"shared RDMA": {"rdma", `{"isRdma":true}`, false, nil, []string{"0000:a1:00.2" + offered, "0000:a1:00.3" + offered}},
		"exclusive RDMA": {"rdma", `{"isRdma":true}`, true, []string{"resourceList[0].selectors.isRdma: " + onlyOnNode},
			[]string{"0000:a1:00.2" + offered, "0000:a1:00.3" + offered}},
		"without isRdma": {"rdma", `{"vendors":["15b3"],"isRdma":false}`, true, nil, []string{"0000:a1:00.2" + offered, "0000:a1:00.3" + offered}},
	} {
		t.Run(name, func(t *testing.T) {
			sysfs := pcitest.Extract(t, test.archive)
			if test.exclusive {
				at := filepath.Join(sysfs, "module/ib_core/parameters")
				if err := errors.Join(os.MkdirAll(at, 0o755), os.WriteFile(filepath.Join(at, "netns_mode"), []byte("N\n"), 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			s, err := pci.Scan(sysfs)
			if err != nil {
				t.Fatal(err)
			}
			c := mustParse(t, `{"resourceList":[{"resourceName":"x","selectors":`+test.selectors+`}]}`)
			var findings, explained []string
			for _, f := range Findings(c, s, Env{}) {
				findings = append(findings, f.Key+": "+f.Text)
			}
			for _, e := range Explain(c, s, Env{}) {
				if e.Resource != "" {
					explained = append(explained, e.Device.String()+" "+e.Reason)
				}
			}
			slices.Sort(findings)
			if diff := cmp.Diff([]any{test.findings, test.explained}, []any{findings, explained}); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

// Package kubelet_test runs pods with VFs through a real kubelet, a real containerd and the programs of this repository. Package node
// creates the node for the run. Files in sysfs give the node 16 CPUs on two NUMA nodes, and two PFs with four VFs each on each NUMA node.
//
//	KUBELET       kubelet to run (make node builds one)
//	PODLACE_BIN   folder of the plugins (default ../../../bin)
//	CONTAINERD    containerd to run instead of the one in PATH, 1.6 or newer
//	KERNELTEST    "require" makes a missing prerequisite a failure
package kubelet_test

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/podlace/podlace/integration/harness/node"
)

func TestMain(m *testing.M) {
	runc, err := filepath.Abs("testdata/runc.sh")
	if err != nil {
		fmt.Println("FAIL:", err)
		os.Exit(1)
	}
	os.Exit(node.Lab{Needs: checkPrograms, Warm: fakeMachine, Env: []string{"RUNC=" + runc}}.Main(m))
}

// checkPrograms returns an error unless the required programs exist, except containerd and the CNI plugins.
func checkPrograms() error {
	plugins, err := node.Plugins()
	if err != nil {
		return err
	}
	for _, path := range []string{kubeletPath(), filepath.Join(plugins, "sriov-device-plugin"), filepath.Join(plugins, "podlace")} {
		if _, err := os.Stat(path); err != nil {
			return node.Unmet(fmt.Sprintf("missing: %v (make node has all)", err))
		}
	}
	return nil
}

func kubeletPath() string { return cmp.Or(os.Getenv("KUBELET"), "/usr/bin/kubelet") }

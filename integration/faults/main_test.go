// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"os"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

func TestMain(m *testing.M) {
	soakFlags()
	os.Setenv("KERNELTEST_PART", "all") // one sandbox: the tests expect the lock files that earlier ones leave
	harness.Main(m, harness.Programs(append(harness.AllPlugins(), "podlace")...),
		harness.Faulty(append(harness.AllPlugins(), "sriov", "podlace", "podlace-node")...), buildRoutesTest)
}

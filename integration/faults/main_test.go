// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

func TestMain(m *testing.M) {
	soakFlags()
	harness.Main(m, harness.Programs(append(harness.AllPlugins(), "podlace-pod", "podlace")...),
		harness.Faulty(append(harness.AllPlugins(), "podlace-pod", "sriov", "podlace", "podlace-node")...), buildRoutesTest)
}

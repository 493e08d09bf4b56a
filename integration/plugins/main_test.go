// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

func TestMain(m *testing.M) {
	harness.Main(m, harness.Programs(append(harness.AllPlugins(), "podlace-pod", "sriov", "podlace")...), harness.Calico, harness.Reference)
}

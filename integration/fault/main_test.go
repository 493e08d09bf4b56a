// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// binEnv names the folder of the programs under test.
const binEnv = "PODLACE_FAULT_BIN"

func TestMain(m *testing.M) {
	harness.Main(m, binEnv, func(dir string) ([]string, error) {
		return []string{binEnv + "=" + dir}, harness.Build("../..", dir, "-tags=podlace_fault", "./plugins/...")
	})
}

// SPDX-License-Identifier: Apache-2.0

package kernels

import (
	"fmt"
	"os"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// kernelEnv is the environment variable with the name of the kernel in scripts/vm/kernels.
const kernelEnv = "PODLACE_KERNEL"

func TestMain(m *testing.M) {
	if os.Getenv(kernelEnv) == "" {
		fmt.Println("SKIP integration/kernels: make kernels runs these tests on each kernel in a virtual machine")
		return
	}
	harness.Main(m)
}

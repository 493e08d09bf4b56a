// SPDX-License-Identifier: Apache-2.0

package kernels

import (
	"fmt"
	"os"
	"testing"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// kernelEnv has the name of the kernel in scripts/vm/kernels.
const kernelEnv = "PODLACE_KERNEL"

// Tests run one after another in one sandbox, because they measure traffic.
func TestMain(m *testing.M) {
	if os.Getenv(kernelEnv) == "" {
		fmt.Println("SKIP integration/kernels: make kernels runs these tests on each kernel in a virtual machine")
		return
	}
	inside, code, err := sandbox.Enter()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if inside {
		code = m.Run()
	}
	os.Exit(code)
}

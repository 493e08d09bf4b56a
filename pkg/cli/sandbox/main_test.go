// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"os"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		os.Exit(play(role))
	}
	kerneltest.Main(m)
}

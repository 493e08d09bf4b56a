// SPDX-License-Identifier: Apache-2.0

package snapshot_test

import (
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

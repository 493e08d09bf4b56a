// SPDX-License-Identifier: Apache-2.0

// Package cluster attaches pods to two simulated nodes with the shipped configurations, and tests connections between them.
package cluster

import (
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

func TestMain(m *testing.M) { harness.Main(m, harness.Programs(harness.AllPlugins()...)) }

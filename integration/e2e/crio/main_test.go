// SPDX-License-Identifier: Apache-2.0

// Package crio calls whole conflists in the order and with the documents of CRI-O, and restarts it. No CRI-O runs.
package crio

import (
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// SPDX-License-Identifier: Apache-2.0

// Package upgrade tests that a node with running pods can change from older programs to those of this tree, and back.
package upgrade

import (
	"os"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// oldEnv is the environment variable with the folder of the older programs, which make upgrade sets.
const oldEnv = "PODLACE_OLD"

func TestMain(m *testing.M) { harness.Main(m, harness.Programs(programs()...)) }

// A version is one build of all programs.
type version struct {
	name, folder string
	format       int // of the records that it writes
}

// versions returns the older programs and those of this tree. It skips the test if there are no older ones.
func versions(t *testing.T) (older, newer *version) {
	t.Helper()
	folder := os.Getenv(oldEnv)
	if folder == "" {
		t.Skip("SKIPPED: " + oldEnv + " names no folder of older programs: run 'make upgrade'")
	}
	older, newer = &version{name: "old", folder: folder}, &version{name: "new", folder: harness.BinDir()}
	for _, v := range []*version{older, newer} {
		for _, program := range programs() {
			if !harness.Present(v.folder, program) {
				t.Fatalf("no %s in %s", program, v.folder)
			}
		}
	}
	return older, newer
}

func programs() []string { return append(harness.AllPlugins(), "sriov", "podlace") }

// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// TestSwapUnderLoad (F-43): scripts/install.sh replaces the reference plugins by Podlace's and back while several pods run ADD and DEL,
// none of which may fail. A rollback then removes all remaining state.
func TestSwapUnderLoad(t *testing.T) {
	reference := needReference(t)
	for _, backends := range []string{"iptables", "nftables"} {
		t.Run(backends, func(t *testing.T) {
			bin := t.TempDir()
			replacePlugins(t, reference, bin)
			n := mixedNetwork(t, backends, bin, 7500)
			t.Cleanup(func() { n.removeState(t) })
			createSharedState(t, n.withPlugins(reference), n.withPlugins(harness.BinDir()))
			mustRollback(t, n, "--yes")
			before := takeSnapshot(t)

			const workers = 3
			rounds := harness.Some(4, 12)
			var pods [workers]*sandbox.Pod
			for i := range pods {
				pods[i] = newPod(t, fmt.Sprint("swap", i))
			}
			var load sync.WaitGroup
			var swaps atomic.Int64
			for i, pod := range pods {
				load.Go(func() {
					for round := 0; round < rounds || swaps.Load() < int64(rounds); round++ { // on a busy machine the swaps take longer
						of := mixedNetwork(t, backends, bin, 20000+round*workers+i)
						id := fmt.Sprintf("swap%d-%d", i, round)
						if err := of.tryAdd(t, id, pod); err != nil {
							t.Errorf("ADD: %v", err)
						}
						of.del(t, id, pod)
					}
				})
			}
			done := make(chan struct{})
			go func() { load.Wait(); close(done) }()
			for busy := true; busy; swaps.Add(1) {
				replacePlugins(t, []string{harness.BinDir(), reference}[swaps.Load()%2], bin)
				select {
				case <-done:
					busy = false
				default:
				}
			}
			if count := swaps.Load(); count < int64(rounds) {
				t.Errorf("the programs were replaced only %d times", count)
			}
			replacePlugins(t, reference, bin)
			mustRollback(t, n, "--yes")
			kerneltest.NoLeak(t, before, oracleOptions())
		})
	}
}

// replacePlugins copies one folder's plugins over another's.
func replacePlugins(t *testing.T, from, to string) {
	t.Helper()
	script, err := filepath.Abs(filepath.Join(treeRoot, "scripts/install.sh"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(script, from, to, "bridge", "host-local", "portmap", "bandwidth")
	cmd.Env = os.Environ()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("install: %v\n%s", err, out)
	}
}

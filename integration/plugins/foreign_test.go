// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// TestF44ForeignHands (F-44): the reference plugin host-local and Podlace's host-local use the same folder in turn. No address is assigned
// twice. Each of the two plugins can delete leases that the other plugin created. No state remains.
func TestF44ForeignHands(t *testing.T) {
	harness.Need(t, "host-local")
	reference := filepath.Join(harness.ReferenceDir(), "host-local")
	if _, err := os.Stat(reference); err != nil {
		t.Skip("SKIPPED: the reference's host-local could not be built")
	}
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 44))
	t.Logf("seed %d", seed)
	binaries := []string{reference, filepath.Join(harness.BinDir(), "host-local")}
	dir := t.TempDir()
	const size = 2 * 13 // a /28 without network, broadcast and gateway, twice
	given, by := map[string]string{}, map[string]string{}
	stdin := string(harness.Encode(object{"cniVersion": "1.0.0", "name": "mixed", "type": "bridge",
		"ipam": object{"type": "host-local", "dataDir": dir,
			"ranges": []any{[]any{object{"subnet": "10.90.0.0/28"}, object{"subnet": "10.91.0.0/28"}}}}}))
	call := func(binary, verb, id string) (string, error) {
		cmd := exec.Command(binary)
		cmd.Env = []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + id, "CNI_IFNAME=eth0", "CNI_NETNS=/proc/self/ns/net", "CNI_PATH=/",
			"CNI_NETNS_OVERRIDE=1"}
		cmd.Stdin = strings.NewReader(stdin)
		out, err := cmd.Output()
		return string(out), err
	}
	for step := range 400 {
		binary, id := binaries[random.IntN(2)], fmt.Sprint("c", random.IntN(size+4))
		if random.IntN(2) == 0 {
			if out, err := call(binary, "DEL", id); err != nil {
				t.Fatalf("step %d: %s DEL %s: %v %s", step, binary, id, err, out)
			}
			delete(given, id)
		} else {
			_, has := given[id]
			if has && by[id] == reference {
				binary = reference // only its scan of all leases finds such a second ADD, which the CNI specification forbids
			}
			out, err := call(binary, "ADD", id)
			if wantErr := has || len(given) == size; (err != nil) != wantErr {
				t.Fatalf("step %d: %s ADD %s with %d leases: %v %s", step, binary, id, len(given), err, out)
			}
			if err == nil {
				var result struct {
					IPs []struct{ Address netip.Prefix }
				}
				if err := json.Unmarshal([]byte(out), &result); err != nil || len(result.IPs) != 1 {
					t.Fatalf("step %d: %v %s", step, err, out)
				}
				given[id], by[id] = result.IPs[0].Address.Addr().String(), binary
			}
		}
		mustBeLeased(t, filepath.Join(dir, "mixed"), given)
	}
	for id := range given {
		if out, err := call(binaries[random.IntN(2)], "DEL", id); err != nil {
			t.Errorf("DEL %s: %v %s", id, err, out)
		}
	}
	mustBeLeased(t, filepath.Join(dir, "mixed"), nil)
}

// mustBeLeased checks that exactly the assigned addresses have lease files.
func mustBeLeased(t *testing.T, dir string, given map[string]string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	leases := 0
	for _, e := range entries {
		if _, err := netip.ParseAddr(e.Name()); err == nil {
			leases++
		}
	}
	for id, addr := range given {
		if data, err := os.ReadFile(filepath.Join(dir, addr)); string(data) != id+"\r\neth0" {
			t.Fatalf("the lease of %s for %s: %q, %v", addr, id, data, err)
		}
	}
	if leases != len(given) {
		t.Fatalf("%d leases, want %d", leases, len(given))
	}
}

// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// TestF44ForeignHands (F-44): the reference plugin host-local and Podlace's use the same folder in turn. No address is assigned twice, each
// can delete the other's leases, and no state remains.
func TestF44ForeignHands(t *testing.T) {
	f := newForeign(t, "10.90.0.0/28", "10.91.0.0/28")
	reference := f.binaries[0]
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 44))
	t.Logf("seed %d", seed)
	const size = 2 * 13 // a /28 without network, broadcast and gateway, twice
	given, by := map[string]string{}, map[string]string{}
	for step := range 400 {
		binary, id := f.binaries[random.IntN(2)], fmt.Sprint("c", random.IntN(size+4))
		if random.IntN(2) == 0 {
			if out, err := f.call(binary, "DEL", id); err != nil {
				t.Fatalf("step %d: %s DEL %s: %v %s", step, binary, id, err, out)
			}
			delete(given, id)
		} else {
			_, has := given[id]
			if has && by[id] == reference {
				binary = reference // only its scan of all leases finds such a second ADD, which the CNI specification forbids
			}
			out, err := f.call(binary, "ADD", id)
			if wantErr := has || len(given) == size; (err != nil) != wantErr {
				t.Fatalf("step %d: %s ADD %s with %d leases: %v %s", step, binary, id, len(given), err, out)
			}
			if err == nil {
				given[id], by[id] = addressIn(t, out), binary
			}
		}
		mustBeLeased(t, f.folder, given)
	}
	for id := range given {
		if out, err := f.call(f.binaries[random.IntN(2)], "DEL", id); err != nil {
			t.Errorf("DEL %s: %v %s", id, err, out)
		}
	}
	mustBeLeased(t, f.folder, nil)
}

// TestF44ForeignAtOnce (F-44): 200 pods start at once, half of them by the reference plugin, and end at once by the other.
func TestF44ForeignAtOnce(t *testing.T) {
	f := newForeign(t, "10.90.0.0/24")
	given := map[string]string{}
	for turn, verb := range []string{"ADD", "DEL"} {
		var mutex sync.Mutex
		var group sync.WaitGroup
		for i := range 200 {
			group.Go(func() {
				id := fmt.Sprint("at-once-", i) // no record of another test in the same network has it
				out, err := f.call(f.binaries[(i+turn)%2], verb, id)
				mutex.Lock()
				defer mutex.Unlock()
				if err != nil {
					t.Errorf("%s %s: %v %s", verb, id, err, out)
				} else if delete(given, id); verb == "ADD" {
					given[id] = addressIn(t, out)
				}
			})
		}
		group.Wait()
		mustBeLeased(t, f.folder, given)
	}
}

// foreign is a lease folder that the reference plugins' and Podlace's host-local share.
type foreign struct {
	binaries []string // the reference's, and that of this tree
	folder   string
	stdin    []byte
}

func newForeign(t *testing.T, subnets ...string) foreign {
	t.Helper()
	harness.Need(t, "host-local")
	reference := filepath.Join(harness.ReferenceDir(), "host-local")
	if _, err := os.Stat(reference); err != nil {
		t.Skip("SKIPPED: the reference's host-local could not be built")
	}
	var set []any
	for _, subnet := range subnets {
		set = append(set, object{"subnet": subnet})
	}
	dir := t.TempDir()
	return foreign{[]string{reference, filepath.Join(harness.BinDir(), "host-local")}, filepath.Join(dir, "mixed"), harness.Encode(object{
		"cniVersion": "1.0.0", "name": "mixed", "type": "bridge",
		"ipam": object{"type": "host-local", "dataDir": dir, "ranges": []any{set}}})}
}

func (f foreign) call(binary, verb, id string) (string, error) {
	cmd := exec.Command(binary)
	cmd.Env = []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + id, "CNI_IFNAME=eth0", "CNI_NETNS=/proc/self/ns/net", "CNI_PATH=/",
		"CNI_NETNS_OVERRIDE=1"}
	cmd.Stdin = bytes.NewReader(f.stdin)
	out, err := cmd.Output()
	return string(out), err
}

func addressIn(t *testing.T, out string) string {
	t.Helper()
	var result struct {
		IPs []struct{ Address netip.Prefix }
	}
	if err := json.Unmarshal([]byte(out), &result); err != nil || len(result.IPs) != 1 {
		t.Errorf("%v %s", err, out)
		return ""
	}
	return result.IPs[0].Address.Addr().String()
}

// mustBeLeased checks that exactly the assigned addresses have lease files.
func mustBeLeased(t *testing.T, dir string, given map[string]string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	leases := map[string]string{}
	for _, e := range entries {
		if _, err := netip.ParseAddr(e.Name()); err == nil {
			data, err := os.ReadFile(filepath.Join(dir, e.Name()))
			leases[e.Name()] = fmt.Sprint(string(data), err)
		}
	}
	for id, addr := range given {
		if data, err := os.ReadFile(filepath.Join(dir, addr)); string(data) != id+"\r\neth0" {
			t.Fatalf("the lease of %s for %s: %q, %v", addr, id, data, err)
		}
	}
	if len(leases) != len(given) {
		t.Fatalf("%d leases, want %d: %q", len(leases), len(given), leases)
	}
}

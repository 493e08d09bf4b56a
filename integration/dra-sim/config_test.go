// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/claimcheck"
	"github.com/podlace/podlace/pkg/daemon/dra"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// randomConfig returns a claim's configuration entry for all requests or a random one, and for Podlace's driver or another.
func randomConfig(r *rand.Rand, names []string) resourceapi.DeviceClaimConfiguration {
	settings := map[string]any{"apiVersion": vfconfig.APIVersion, "kind": vfconfig.Kind}
	for key, values := range map[string][]any{"vlan": {100, 150, 300}, "mtu": {1400, 1450}, "trust": {"off"}, "ifName": {"data{index}"}} {
		if r.IntN(3) == 0 {
			settings[key] = values[r.IntN(len(values))]
		}
	}
	if r.IntN(3) == 0 {
		settings["resource"] = []string{"example.com/fast", "example.com/slow"}[r.IntN(2)]
	}
	text, _ := json.Marshal(settings)
	var c resourceapi.DeviceClaimConfiguration
	c.Opaque = &resourceapi.OpaqueDeviceConfiguration{Driver: claim.Driver, Parameters: runtime.RawExtension{Raw: text}}
	if r.IntN(5) == 0 {
		c.Opaque.Driver, c.Opaque.Parameters.Raw = "gpu.example.com", []byte(`{"kind": "GPUConfig", "vlann": 1}`)
	}
	if r.IntN(2) == 0 {
		c.Requests = []string{names[r.IntN(len(names))]}
	}
	return c
}

// TestSameConfiguration (DRA-13) checks, with each allocator of Kubernetes, that Prepare and check-claim merge the same settings. The
// entries use every valid form of a request name.
func TestSameConfiguration(t *testing.T) {
	parsed, err := parseDefaultConfig()
	if err != nil {
		t.Fatal(err)
	}
	printed, err := printedClasses(t.TempDir(), defaultConfig)
	if err != nil {
		t.Fatal(err)
	}
	merged, refused := 0, 0
	for seed := range uint64(machineCount) {
		r := rand.New(rand.NewPCG(seed, 3))
		p, m := randomProblem(r, false)
		m.pfs, m.vfs, p.match = 2, 8, ""
		for n := range p.requests {
			for a := range p.requests[n] {
				p.requests[n][a].wish = selectorCases()[0]
			}
		}
		c := p.toClaim()
		var names []string
		for _, request := range c.Spec.Devices.Requests {
			names = append(names, request.Name)
			for _, sub := range request.FirstAvailable {
				names = append(names, request.Name+"/"+sub.Name)
			}
		}
		for range r.IntN(4) {
			c.Spec.Devices.Config = append(c.Spec.Devices.Config, randomConfig(r, names))
		}
		said := checkedSettings(t, c)
		for _, ch := range channels() {
			got, err := preparedAs(t, newCluster(printed, publishedSlices(m.name, m.inventory(parsed))), ch, m, c, parsed)
			alternatives := slices.ContainsFunc(p.requests, func(a []requestCase) bool { return len(a) > 1 })
			if err == nil && said == nil && alternatives {
				continue // check-claim refuses because of an alternative that was not allocated
			}
			if (err != nil) != (said == nil) {
				t.Fatalf("%s, seed %d: Prepare says %v, check-claim %v: %s", ch.name, seed, err, said, pretty(c))
			}
			if err != nil {
				refused++
				continue
			}
			merged++
			for _, request := range slices.Sorted(maps.Keys(got)) {
				if diff := cmp.Diff(said[request], got[request]); diff != "" {
					t.Fatalf("%s, seed %d, request %s (-check-claim +Prepare):\n%s\n%s", ch.name, seed, request, diff, pretty(c))
				}
			}
		}
	}
	if merged < 100 || refused < 100 {
		t.Errorf("%d claims are prepared, %d refused: want more of each", merged, refused)
	}
}

func pretty(v any) string {
	text, _ := json.MarshalIndent(v, "", " ")
	return string(text)
}

// preparedAs returns, by request and key, the settings that Prepare merges for an allocated claim.
func preparedAs(t *testing.T, cl *allocatorInput, ch allocatorVariant, m machine, c *resourceapi.ResourceClaim,
	parsed *pool.Config) (map[string]map[string]string, error) {
	t.Helper()
	a, err := cl.allocator(t.Context(), ch.features)
	if err != nil {
		t.Fatal(err)
	}
	results, err := a.Allocate(t.Context(), newNode(m.name), []*resourceapi.ResourceClaim{c})
	if err != nil || len(results) != 1 {
		t.Fatalf("%s: %v, %v: %s", ch.name, results, err, pretty(c))
	}
	allocated := c.DeepCopy()
	allocated.Status.Allocation = &results[0]
	settings, err := dra.Settings(allocated, func(device string) dra.Target { return dra.Target{Resource: resourceOf(parsed, cl, device)} })
	out := map[string]map[string]string{}
	for i, s := range settings {
		of := map[string]string{}
		for _, key := range s.Set() {
			of[key] = s.Text(key)
		}
		out[results[0].Devices.Results[i].Request] = of
	}
	return out, err
}

// resourceOf returns the configured resource to which a device belongs.
func resourceOf(parsed *pool.Config, cl *allocatorInput, device string) *pool.Resource {
	for _, s := range cl.slices {
		for _, d := range s.Spec.Devices {
			for i := range parsed.Resources {
				if d.Name == device && text(d, "resource") == parsed.Resources[i].FullName() {
					return &parsed.Resources[i]
				}
			}
		}
	}
	return nil
}

// checkedSettings returns the settings that check-claim prints by request and key, or nil if it reports a problem.
func checkedSettings(t *testing.T, c *resourceapi.ResourceClaim) map[string]map[string]string {
	t.Helper()
	dir := t.TempDir()
	c.TypeMeta = metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim"}
	text, _ := json.Marshal(c)
	for name, data := range map[string][]byte{"config.json": []byte(defaultConfig), "c.json": text} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var stdout, stderr bytes.Buffer
	claimcheck.Run([]string{"check-claim", filepath.Join(dir, "c.json"), "--config-file", filepath.Join(dir, "config.json"),
		"--resource-prefix", "example.com", "-o", "json"}, nil, &stdout, &stderr)
	var answer struct {
		Requests []struct {
			Request  string
			Settings []struct{ Key, Value string }
		}
		Problems []string
	}
	if err := json.Unmarshal(stdout.Bytes(), &answer); err != nil {
		t.Fatalf("%v: %s%s", err, stdout.String(), stderr.String())
	}
	if len(answer.Problems) > 0 {
		return nil
	}
	out := map[string]map[string]string{}
	for _, r := range answer.Requests {
		out[r.Request] = map[string]string{}
		for _, s := range r.Settings {
			out[r.Request][s.Key] = s.Value
		}
	}
	return out
}

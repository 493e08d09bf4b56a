// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/harness/card"
	"github.com/podlace/podlace/integration/kerneltest"
	records "github.com/podlace/podlace/pkg/attachment"
)

var update = flag.Bool("update", false, "write the samples of a new format, before the first release that writes it")

// newest is the format that this tree writes. testdata/format<n> has a sample of each file in format n. Released programs have written such
// files on nodes, so no sample may change or go.
const newest = 1

// sampleCase is a pod whose state files have samples.
type sampleCase struct {
	conflist []byte
	caps     map[string]any
	vfs      int
	files    []string // patterns, in which HASH stands for the hash of the attachment
}

func sampleCases(t *testing.T) map[string]sampleCase {
	t.Helper()
	vf, err := conf.Conflist("10-podlace-sriov-main.conflist")
	kerneltest.Must(t, err)
	alone := harness.Encode(harness.Object{"cniVersion": "1.1.0", "name": "alone", "plugins": []any{harness.Object{
		"type": "host-local", "ipam": harness.Object{"type": "host-local", "subnet": "10.72.0.0/24"}}}})
	return map[string]sampleCase{
		"chain": {harness.ChainOf(t, "1.1.0", "nftables"), harness.Capabilities(), 0, []string{
			"/run/podlace/chain/bridge-HASH", "/run/podlace/chain/portmap-HASH", "/run/podlace/chain/bandwidth-HASH"}},
		"host-local": {alone, nil, 0, []string{"/run/podlace/alone/host-local-HASH"}},
		"sriov":      {vf, nil, 1, []string{"/run/podlace/*/sriov-HASH", "/run/podlace/.vfs/" + card.Address(0)}},
	}
}

// TestSamples: each file that an older version wrote about a pod is read, checked and deleted. Its sample gets a running pod's values and
// replaces what this version wrote.
func TestSamples(t *testing.T) {
	for title, c := range harness.InOrder(sampleCases(t)) {
		for format := 1; format <= newest; format++ {
			t.Run(fmt.Sprint(title, " format ", format), func(t *testing.T) { c.run(t, format) })
		}
	}
}

func (c sampleCase) run(t *testing.T, format int) {
	t.Helper()
	if c.vfs > 0 {
		card.New(t, c.vfs)
	}
	n, err := harness.OpenNetwork(c.conflist, t.TempDir(), nil)
	kerneltest.Must(t, err)
	rt := harness.Attachment(harness.NewPod(t, "sample"), "sample", c.caps)
	n.Must(t, "ADD", rt) // creates what all pods share
	n.Must(t, "DEL", rt)
	before := harness.Watch(t)
	n.Must(t, "ADD", rt)
	listed := list(t)
	hash := records.Key{Network: n.List.Name, ContainerID: "sample", IfName: "eth0"}.Hash()
	for _, pattern := range c.files {
		paths, err := filepath.Glob(strings.Replace(pattern, "HASH", hash, 1))
		if err != nil || len(paths) != 1 {
			t.Fatalf("%s: %q, %v", pattern, paths, err)
		}
		putSample(t, format, paths[0], strings.TrimSuffix(filepath.Base(pattern), "-HASH"))
	}
	if diff := cmp.Diff(listed, list(t)); diff != "" {
		t.Errorf("podlace ls: %s", diff)
	}
	n.Must(t, "CHECK", rt)
	n.Must(t, "DEL", rt)
	before.Clean(t, "DEL")
}

// putSample replaces a file by its sample, with the values of the file.
func putSample(t *testing.T, format int, path, kind string) {
	t.Helper()
	data, err := os.ReadFile(path)
	kerneltest.Must(t, err)
	info, err := os.Stat(path)
	kerneltest.Must(t, err)
	var current, sample any
	kerneltest.Must(t, json.Unmarshal(data, &current))
	name := filepath.Join("testdata", fmt.Sprint("format", format), strings.Replace(kind, card.Address(0), "journal", 1)+".json")
	if *update && format == newest {
		if _, err := os.Stat(name); err == nil {
			t.Fatalf("%s exists: a format that was written never changes; raise newest", name)
		}
		text, err := json.MarshalIndent(current, "", "  ")
		kerneltest.Must(t, err, os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, append(text, '\n'), 0o644))
	}
	data, err = os.ReadFile(name)
	kerneltest.Must(t, err, json.Unmarshal(data, &sample))
	if diff := cmp.Diff(shape(sample), shape(current)); format == newest && diff != "" {
		t.Errorf("%s has other keys than %s: keep them, or raise the format and write a new sample (-sample +file)\n%s", path, name, diff)
	}
	data, err = json.Marshal(overlay(sample, current))
	kerneltest.Must(t, err, os.WriteFile(path, data, 0o600), os.Chtimes(path, info.ModTime(), info.ModTime()))
}

// shape returns a JSON value without its scalars.
func shape(value any) any {
	switch v := value.(type) {
	case map[string]any:
		keys := map[string]any{}
		for key, member := range v {
			keys[key] = shape(member)
		}
		return keys
	case []any:
		if len(v) > 0 {
			return []any{shape(v[0])}
		}
	}
	return fmt.Sprintf("%T", value)
}

// overlay returns the sample with the values that stand at the same places of the current value.
func overlay(sample, current any) any {
	of, ok := sample.(map[string]any)
	from, same := current.(map[string]any)
	if !ok || !same {
		return current
	}
	merged := map[string]any{}
	for key, member := range of {
		merged[key] = member
		if now, ok := from[key]; ok && key != "format" {
			merged[key] = overlay(member, now)
		}
	}
	return merged
}

func list(t *testing.T) string {
	t.Helper()
	out, err := exec.Command(filepath.Join(harness.BinDir(), "podlace"), "ls", "-o", "json").CombinedOutput()
	if err != nil {
		t.Fatalf("podlace ls: %v\n%s", err, out)
	}
	return string(out)
}

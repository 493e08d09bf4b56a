// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness"
)

func allVerbs() []string { return []string{"ADD", "CHECK", "DEL", "STATUS", "GC"} }

// TestBadJSON passes invalid configurations, each with one verb or, with FAULTS=all, with every verb.
func TestBadJSON(t *testing.T) {
	const head, badVersion = `{"cniVersion":"1.1.0","name":"table",`, "a version that is a number"
	bad := map[string]string{
		"nothing": "", "space": " \n", "an array": "[]", "null": "null", "a number": "1", "a string": `"x"`, "a zero byte": "\x00",
		"half an object": head + `"type":`, "two documents": head + `"type":"x"}{}`, "trailing text": head + `"type":"x"}x`,
		"a byte order mark": "\xef\xbb\xbf" + head + `"type":"x"}`, "NaN": head + `"mtu":NaN}`,
		"deep nesting": head + `"x":` + strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000) + "}",
		badVersion:     `{"cniVersion":1,"name":"table"}`, "a name that is a number": `{"cniVersion":"1.1.0","name":1}`,
	}
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		i := len(plugin)
		for kind, text := range harness.InOrder(bad) {
			i++
			for _, verb := range harness.OneOf(allVerbs(), i) {
				if verb == "DEL" && kind == badVersion {
					continue // DEL needs only the name of the network
				}
				mustRefuse(t, f, verb+" "+kind, f.Good(verb, plugin).Config(text), "", harness.CodeDecode)
			}
		}
	})
}

// TestGoodJSON passes configurations that are unusual but allowed.
func TestGoodJSON(t *testing.T) {
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		good := map[string][]any{
			"a long string":    {"x-note", strings.Repeat("a", 1<<20)},
			"a reserved key":   {"cni.dev/whatever", []any{1}},
			"runtime's keys":   {"capabilities.aliases", true, "args.cni.labels", []any{map[string]any{"key": "a", "value": "b"}}},
			"other capability": {"runtimeConfig.cgroupPath", "/kubepods", "runtimeConfig.aliases", []any{"a"}},
		}
		for kind, edit := range harness.InOrder(good) {
			runLife(t, f, kind, plugin, func(c harness.Call) harness.Call { return c.Config(f.Conf(plugin).With(edit...)) })
		}
	})
}

// TestGoodTrickle writes the configuration one byte at a time.
func TestGoodTrickle(t *testing.T) {
	f := harness.NewFixture(t, "bridge")
	conf := f.Good("ADD", "bridge").Stdin
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer w.Close()
		for _, b := range conf {
			_, _ = w.Write([]byte{b})
			time.Sleep(50 * time.Microsecond)
		}
	}()
	add := f.Good("ADD", "bridge")
	add.Reader = r
	add.Run(t).OK(t)
	_ = r.Close()
	f.Good("DEL", "bridge").Run(t).OK(t)
	f.Oracle.Clean(t, "trickle")
}

// TestGoodClosedStdout runs ADD while stdout is closed. One DEL must then remove all state.
func TestGoodClosedStdout(t *testing.T) {
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		_ = r.Close()
		f.Life(t, plugin, func() {
			add := f.Good("ADD", plugin)
			add.Stdout = w
			o := add.Run(t)
			_ = w.Close()
			if o.Exit == 0 {
				t.Error("ADD succeeded although its result was lost")
			}
			f.Good("DEL", plugin).Run(t).OK(t)
		})
		f.Oracle.Clean(t, "ADD with a closed stdout, then DEL")
		runLife(t, f, "the next life", plugin, func(c harness.Call) harness.Call { return c })
	})
}

// TestBadName calls the plugins with network names that cannot be part of a path.
func TestBadName(t *testing.T) {
	bad := []any{nil, "", "a/b", "../x", "..", "a b", "-a", "é", "a\n", "a;b", strings.Repeat("a", 256), strings.Repeat("a", 4096), "\u0000"}
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		for i, name := range bad {
			for _, verb := range harness.OneOf(allVerbs(), i+len(plugin)) {
				conf := f.Good(verb, plugin)
				var o object
				if err := json.Unmarshal(conf.Stdin, &o); err != nil {
					t.Fatal(err)
				}
				text, _ := name.(string)
				mustRefuse(t, f, verb+" "+short(text), conf.Config(o.With("name", name)), "network name", harness.CodeConfig)
			}
		}
	})
}

// TestBadVersion passes CNI versions that do not exist, and calls verbs that a CNI version does not have.
func TestBadVersion(t *testing.T) {
	since := map[string]string{"ADD": "0.1.0", "CHECK": "0.4.0", "GC": "1.1.0", "STATUS": "1.1.0"}
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		for verb, first := range harness.InOrder(since) {
			for i, v := range append([]string{"0.0.1", "1.0", "1.2.0", "2.0.0", "x", "1.0.0-rc1"}, harness.AllVersions()...) {
				if (i+len(plugin+verb))%harness.Some(2, 1) != 0 {
					continue
				}
				if slices.Contains(harness.AllVersions(), v) && v >= first && v >= harness.OldestOf(plugin) {
					continue
				}
				c := f.Good(verb, plugin).Config(f.Conf(plugin).With("cniVersion", v))
				mustRefuse(t, f, verb+" "+v, c, v, harness.CodeVersion)
			}
		}
	})
}

func TestVersion(t *testing.T) {
	for _, plugin := range harness.AllPlugins() {
		t.Run(plugin, func(t *testing.T) {
			harness.Need(t, plugin)
			i := slices.Index(harness.AllVersions(), harness.OldestOf(plugin))
			for stdin, want := range map[string]string{
				`{"cniVersion":"0.3.1"}`: "0.3.1", `{"cniVersion":"1.1.0"}`: "1.1.0", `{"cniVersion":"1.0.0"}`: "1.0.0",
				"": "1.1.0", "garbage": "1.1.0", "{}": "1.1.0",
			} {
				var got struct {
					CNIVersion        string   `json:"cniVersion"`
					SupportedVersions []string `json:"supportedVersions"`
				}
				o := harness.Call{Plugin: plugin, Env: map[string]string{"CNI_COMMAND": "VERSION"}, Stdin: []byte(stdin)}.Run(t).OK(t)
				harness.OneDocument(t, o.Stdout, &got)
				if got.CNIVersion != want || !slices.Equal(got.SupportedVersions, harness.AllVersions()[i:]) {
					t.Errorf("stdin %q: got %+v, want %s and %v", stdin, got, want, harness.AllVersions()[i:])
				}
			}
		})
	}
}

// TestUnknownKey passes a misspelled key. The plugin logs a warning that suggests the most similar key.
func TestUnknownKey(t *testing.T) {
	typos := map[string][][2]string{
		"bridge":     {{"isGatway", "isGateway"}, {"ipMask", "ipMasq"}, {"ipam.subnt", "subnet"}},
		"host-local": {{"ipam.rangeStrat", "rangeStart"}, {"ipam.dataDri", "dataDir"}},
		"portmap":    {{"markMasqBits", "markMasqBit"}, {"backnd", "backend"}},
		"bandwidth":  {{"ingresRate", "ingressRate"}},
		"loopback":   {{"nmae", "name"}},
	}
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		for _, typo := range typos[plugin] {
			f.Life(t, plugin, func() {
				conf := f.Conf(plugin).With(typo[0], "x")
				o := f.Good("ADD", plugin).Config(conf).Run(t).OK(t)
				key := typo[0][strings.LastIndex(typo[0], ".")+1:]
				if !strings.Contains(o.Stderr, key) || !strings.Contains(o.Stderr, typo[1]) {
					t.Errorf("%s: stderr does not name the key and %s: %s", typo[0], typo[1], o.Stderr)
				}
				f.Good("DEL", plugin).Config(conf).Run(t).OK(t)
			})
			f.Oracle.Clean(t, typo[0])
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

func allVerbs() []string { return []string{"ADD", "CHECK", "DEL", "STATUS", "GC"} }

// TestBadJSON gives every verb what is no configuration at all.
func TestBadJSON(t *testing.T) {
	const head, badVersion = `{"cniVersion":"1.1.0","name":"table",`, "a version that is a number"
	bad := map[string]string{
		"nothing": "", "space": " \n", "an array": "[]", "null": "null", "a number": "1", "a string": `"x"`, "a zero byte": "\x00",
		"half an object": head + `"type":`, "two documents": head + `"type":"x"}{}`, "trailing text": head + `"type":"x"}x`,
		"a byte order mark": "\xef\xbb\xbf" + head + `"type":"x"}`, "NaN": head + `"mtu":NaN}`,
		"deep nesting": head + `"x":` + strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000) + "}",
		badVersion:     `{"cniVersion":1,"name":"table"}`, "a name that is a number": `{"cniVersion":"1.1.0","name":1}`,
	}
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		for kind, text := range inOrder(bad) {
			for _, verb := range allVerbs() {
				if verb == "DEL" && kind == badVersion {
					continue // DEL needs the name of the network alone
				}
				f.mustRefuse(t, verb+" "+kind, f.good(verb, plugin).config(text), "", codeDecode)
			}
		}
	})
}

// TestGoodJSON holds documents that look odd and are allowed.
func TestGoodJSON(t *testing.T) {
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		good := map[string][]any{
			"a long string":    {"x-note", strings.Repeat("a", 1<<20)},
			"a reserved key":   {"cni.dev/whatever", []any{1}},
			"runtime's keys":   {"capabilities.aliases", true, "args.cni.labels", []any{map[string]any{"key": "a", "value": "b"}}},
			"other capability": {"runtimeConfig.cgroupPath", "/kubepods", "runtimeConfig.aliases", []any{"a"}},
		}
		for kind, edit := range inOrder(good) {
			f.lives(t, kind, plugin, func(c call) call { return c.config(f.conf(plugin).with(edit...)) })
		}
	})
}

// TestGoodTrickle writes the configuration byte by byte.
func TestGoodTrickle(t *testing.T) {
	f := newFixture(t, "bridge")
	conf := f.good("ADD", "bridge").stdin
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
	add := f.good("ADD", "bridge")
	add.reader = r
	add.run(t).ok(t)
	_ = r.Close()
	f.good("DEL", "bridge").run(t).ok(t)
	f.oracle.clean(t, "trickle")
}

// TestGoodClosedStdout lets nobody read the result: one DEL must clean up.
func TestGoodClosedStdout(t *testing.T) {
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		_ = r.Close()
		f.life(t, plugin, func() {
			add := f.good("ADD", plugin)
			add.stdout = w
			o := add.run(t)
			_ = w.Close()
			if o.exit == 0 {
				t.Error("ADD succeeded although its result got lost")
			}
			f.good("DEL", plugin).run(t).ok(t)
		})
		f.oracle.clean(t, "ADD with a closed stdout, then DEL")
		f.lives(t, "the next life", plugin, func(c call) call { return c })
	})
}

// TestBadName gives a network name that cannot be part of a path.
func TestBadName(t *testing.T) {
	bad := []any{nil, "", "a/b", "../x", "..", "a b", "-a", "é", "a\n", "a;b", strings.Repeat("a", 256), strings.Repeat("a", 4096), "\u0000"}
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		for _, name := range bad {
			for _, verb := range allVerbs() {
				conf := f.good(verb, plugin)
				var o object
				if err := json.Unmarshal(conf.stdin, &o); err != nil {
					t.Fatal(err)
				}
				text, _ := name.(string)
				f.mustRefuse(t, verb+" "+short(text), conf.config(o.with("name", name)), "network name", codeConfig)
			}
		}
	})
}

// oldestOf is the oldest version that a plugin serves.
func oldestOf(plugin string) string {
	if plugin == "bandwidth" {
		return "0.3.0"
	}
	return "0.1.0"
}

func allVersions() []string {
	return []string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}
}

// TestBadVersion asks for versions that do not exist, and for verbs that a
// version does not have.
func TestBadVersion(t *testing.T) {
	since := map[string]string{"ADD": "0.1.0", "CHECK": "0.4.0", "GC": "1.1.0", "STATUS": "1.1.0"}
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		for verb, first := range inOrder(since) {
			for _, v := range append([]string{"0.0.1", "1.0", "1.2.0", "2.0.0", "x", "1.0.0-rc1"}, allVersions()...) {
				if slices.Contains(allVersions(), v) && v >= first && v >= oldestOf(plugin) {
					continue
				}
				c := f.good(verb, plugin).config(f.conf(plugin).with("cniVersion", v))
				f.mustRefuse(t, verb+" "+v, c, v, codeVersion)
			}
		}
	})
}

// TestVersion asks every plugin what it serves.
func TestVersion(t *testing.T) {
	for _, plugin := range allPlugins() {
		t.Run(plugin, func(t *testing.T) {
			need(t, plugin)
			i := slices.Index(allVersions(), oldestOf(plugin))
			for stdin, want := range map[string]string{
				`{"cniVersion":"0.3.1"}`: "0.3.1", `{"cniVersion":"1.1.0"}`: "1.1.0", `{"cniVersion":"1.0.0"}`: "1.0.0",
				"": "1.1.0", "garbage": "1.1.0", "{}": "1.1.0",
			} {
				var got struct {
					CNIVersion        string   `json:"cniVersion"`
					SupportedVersions []string `json:"supportedVersions"`
				}
				o := call{plugin: plugin, env: map[string]string{"CNI_COMMAND": "VERSION"}, stdin: []byte(stdin)}.run(t).ok(t)
				oneDocument(t, o.stdout, &got)
				if got.CNIVersion != want || !slices.Equal(got.SupportedVersions, allVersions()[i:]) {
					t.Errorf("stdin %q: got %+v, want %s and %v", stdin, got, want, allVersions()[i:])
				}
			}
		})
	}
}

// TestUnknownKey accepts a typing error and says what was perhaps meant.
func TestUnknownKey(t *testing.T) {
	typos := map[string][][2]string{
		"bridge":     {{"isGatway", "isGateway"}, {"ipMask", "ipMasq"}, {"ipam.subnt", "subnet"}},
		"host-local": {{"ipam.rangeStrat", "rangeStart"}, {"ipam.dataDri", "dataDir"}},
		"portmap":    {{"markMasqBits", "markMasqBit"}, {"backnd", "backend"}},
		"bandwidth":  {{"ingresRate", "ingressRate"}},
		"loopback":   {{"nmae", "name"}},
	}
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		for _, typo := range typos[plugin] {
			f.life(t, plugin, func() {
				conf := f.conf(plugin).with(typo[0], "x")
				o := f.good("ADD", plugin).config(conf).run(t).ok(t)
				key := typo[0][strings.LastIndex(typo[0], ".")+1:]
				if !strings.Contains(o.stderr, key) || !strings.Contains(o.stderr, typo[1]) {
					t.Errorf("%s: stderr does not name it and %s: %s", typo[0], typo[1], o.stderr)
				}
				f.good("DEL", plugin).config(conf).run(t).ok(t)
			})
			f.oracle.clean(t, typo[0])
		}
	})
}

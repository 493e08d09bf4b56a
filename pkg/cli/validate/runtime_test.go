// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/yamlfile"
)

// TestRefusedByRuntimes: what libcni does not load is an error, whatever the plugins accept.
func TestRefusedByRuntimes(t *testing.T) {
	const loopback = `{"type":"loopback"}`
	for text, want := range map[string]string{
		`{"cniVersion":"1.1.0","name":"a","plugins":[%s]}`:                                 "",
		`{"cniVersion":"1.1.0","name":"a","disableCheck":"x","plugins":[%s]}`:              `disableCheck: error: "x": runtimes refuse`,
		`{"cniVersion":"1.1.0","name":"a","disableGC":3,"plugins":[%s]}`:                   "disableGC",
		`{"cniVersion":"1.1.0","name":"a","type":"loopback"}` + "%.0s":                     `plugins: error: runtimes refuse the configuration: it has no name, or no list`,
		`{"cniVersion":"1.1.0","name":"a","plugins":[{"type":"x","capabilities":[1]},%s]}`: "capabilities",
		"\ufeff" + `{"cniVersion":"1.1.0","name":"a","plugins":[%s]}`:                      "byte order mark",
		`cniVersion: 1.1.0 # %s`: "no JSON",
		`[%s]`:                   "no network configuration",
	} {
		var errs []string
		for _, p := range Files([]yamlfile.File{{Name: "a.conflist", Data: fmt.Appendf(nil, text, loopback)}}, Node{}) {
			if p.Error {
				errs = append(errs, p.String())
			}
		}
		if want == "" && len(errs) > 0 || want != "" && (len(errs) != 1 || !strings.Contains(errs[0], want)) {
			t.Errorf("%s: %q, want %q", text, errs, want)
		}
	}
}

// TestFolderOfList: runtimes add the files in the folder of a network's name to its list. Each fault stands at its own file and key, and an
// unreadable file hides no fault of another.
func TestFolderOfList(t *testing.T) {
	const main = `{"type": "bridge", "bridge": "br0", "isGateway": true, "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}`
	for _, c := range []struct {
		files map[string]string
		want  []string
	}{
		{map[string]string{"1.conf": `{"type": "portmap", "capabilities": {"portMappings": true}}`}, nil},
		{map[string]string{"1.conf": "{\n  \"type\": \"portmap\",\n  \"snat\": 7, \"snatt\": 1,\n \"capabilities\": {\"portMappings\": true}}"},
			[]string{`a/1.conf:3:14: snatt: warning: `, `a/1.conf:3:3: snat: error: `}},
		{map[string]string{"1.conf": `{"type": "../x"}`}, []string{`a/1.conf:1:2: type: error: runtimes refuse the configuration: type "../x": want`}},
		{map[string]string{"1.conf": `{"type": "portmap",}`, "2.conf": `{"type": "bandwidth", "ingressRate": "x"}`},
			[]string{`a/1.conf:1:20: error: no JSON`, `a/2.conf:1:23: ingressRate: error: `}},
		{map[string]string{"1.conf": main}, []string{`a/1.conf:1:1: error: another entry of this network runs bridge already`}},
		{map[string]string{"1.conf": `{"type": "x", "ipam": {"type": "host-local", "subnet": "10.2.0.0/24"}}`},
			[]string{`b.conflist:1:136: plugins[0].ipam.subnet: error: subnet 10.2.0.0/24 overlaps 10.2.0.0/24 of network "a" in a/1.conf`}},
	} {
		dir := t.TempDir()
		if err := os.Mkdir(filepath.Join(dir, "a"), 0o700); err != nil {
			t.Fatal(err)
		}
		for name, text := range c.files {
			if err := os.WriteFile(filepath.Join(dir, "a", name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		other := strings.ReplaceAll(strings.ReplaceAll(main, "br0", "br1"), "10.1.", "10.2.")
		list := func(name, plugins string) yamlfile.File {
			text := `{"cniVersion": "1.0.0", "name": "` + name + `", "plugins": [` + plugins + `]}`
			return yamlfile.File{Name: filepath.Join(dir, name+".conflist"), Data: []byte(text)}
		}
		found := Files([]yamlfile.File{list("a", main), list("b", other)}, Node{})
		if len(found) != len(c.want) {
			t.Errorf("%v: got %q, want %q", c.files, found, c.want)
			continue
		}
		for i, want := range c.want {
			if got := strings.ReplaceAll(found[i].String(), dir+"/", ""); !strings.HasPrefix(got, want) {
				t.Errorf("%v: got %q, want %q", c.files, got, want)
			}
		}
	}
}

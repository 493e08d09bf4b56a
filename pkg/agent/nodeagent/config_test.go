// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/podlace/podlace/pkg/agent/noderoutes"
)

func TestConfig(t *testing.T) {
	all := `{"clusterCIDRs": ["10.244.0.0/16", "fd00::/48"], "routes": false, "offLink": "vxlan", "addressCIDRs": ["192.0.2.0/24"], "mtu": 1400,
		"vxlan": {"vni": 7, "port": 4789}, "binDir": "/b", "confDir": "", "takeOver": true, "adopt": ["boot", "17"],
		"apiServer": "https://192.0.2.1:6443"}`
	want := config{
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00::/48")},
		OffLink:      noderoutes.OffLinkVXLAN, AddressCIDRs: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, MTU: 1400,
		VXLAN: noderoutes.VXLAN{VNI: 7, Port: 4789}, BinDir: "/b", TakeOver: true, Adopt: []int{3, 17}, APIServer: "https://192.0.2.1:6443",
	}
	for text, want := range map[string]config{all: want, "{}": defaults(), " { \"mtu\": 0 } \n": defaults()} {
		got, err := parseConfig("c", []byte(text))
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(config{}), cmpopts.EquateComparable(netip.Prefix{})); err != nil || diff != "" {
			t.Errorf("%s: %v\n%s", text, err, diff)
		}
	}
}

var column = regexp.MustCompile(`(?m)^(c:\d+):\d+`)

// TestConfigRefused: the error has the file, line, key and valid values of every mistake, not only of the first.
func TestConfigRefused(t *testing.T) {
	for text, says := range map[string]string{
		"{\n\n\"offlink\": \"vxlan\"}":                       "c:3: offlink: unknown key; did you mean offLink?",
		"{\n\"vxlan\": {\n\"vny\": 1}}":                      "c:3: vxlan.vny: unknown key; did you mean vni?",
		"{\"adopt\": [\"boot\"],\n\"vxlan\": {\"vni\": 0}}":  "c:2: vxlan.vni: 0: want a whole number between 1 and 16777215",
		"{\"mtu\": 1400,\n\"mtu\": 1500}":                    "c:2: mtu: duplicate key, first in line 1",
		`{"fastPath": "off"}`:                                "c:1: fastPath: unknown key",
		`{"offLink": "tunnel"}`:                              `c:1: offLink: "tunnel": want refuse, vxlan, fabric`,
		`{"mtu": 100}`:                                       "c:1: mtu: 100: want a whole number between 576 and 65535",
		`{"mtu": "1400"}`:                                    `c:1: mtu: "1400": want a number`,
		`{"mtu": 14.5}`:                                      "c:1: mtu: 14.5: want a whole number",
		`{"mtu": -1}`:                                        "c:1: mtu: -1: want a whole number between 576 and 65535, or 0 for the MTU of the uplink",
		`{"takeOver": "yes"}`:                                `c:1: takeOver: "yes": want true or false`,
		`{"takeOver": null}`:                                 "c:1: takeOver: null: want true or false",
		`{"offLink": 7}`:                                     `c:1: offLink: 7: want a string`,
		`{"vxlan": {"port": "8472"}}`:                        `c:1: vxlan.port: "8472": want a number`,
		`{"vxlan": {"vni": 1, "vni": 2}}`:                    "c:1: vxlan.vni: duplicate key",
		`{"binDir": ["/a"]}`:                                 `c:1: binDir: a list: want a string`,
		`{"adopt": "boot"}`:                                  `c:1: adopt: "boot": want a list`,
		`{"adopt": [17]}`:                                    `c:1: adopt[0]: 17: want a string`,
		`{"clusterCIDRs": ["10.244.0.0/16", "127.0.0.0/8"]}`: "c:1: clusterCIDRs[1]: 127.0.0.0/8 overlaps 127.0.0.0/8, which pods cannot use",
		`{"clusterCIDRs": ["ff00::/8"]}`:                     "c:1: clusterCIDRs[0]: ff00::/8 overlaps",
		`{"clusterCIDRs": ["169.254.0.0/16"]}`:               "c:1: clusterCIDRs[0]: 169.254.0.0/16 overlaps",
		`{"clusterCIDRs": ["::ffff:10.0.0.0/104"]}`:          "c:1: clusterCIDRs[0]: \"::ffff:10.0.0.0/104\": want a CIDR such as",
		`{"addressCIDRs": ["::/0"]}`:                         "c:1: addressCIDRs[0]: ::/0 covers all addresses of its family: want",
		`{"apiServer": "https://"}`:                          `c:1: apiServer: "https://": want a URL`,
		"{\n\"mtu\": 1400,\n}":                               "no JSON: invalid character '}'",
		"{mtu: 1400}":                                        "c:1: no JSON: invalid character 'm' looking for beginning of object key string; put commas between keys",
		`{"clusterCIDRs": ["10.244.0.1/16"]}`:                "c:1: clusterCIDRs[0]: 10.244.0.1/16 has host bits set: want 10.244.0.0/16",
		`{"clusterCIDRs": ["0.0.0.0/0"]}`:                    "clusterCIDRs",
		`{"clusterCIDRs": ["ten"]}`:                          `c:1: clusterCIDRs[0]: "ten": want a CIDR such as 10.244.0.0/16`,
		`{"vxlan": 8472}`:                                    `c:1: vxlan: 8472: want an object`,
		`{"binDir": "cni/bin"}`:                              `c:1: binDir: "cni/bin": want an absolute path`,
		`{"adopt": ["kernel"]}`:                              `c:1: adopt[0]: "kernel": want boot, static, or the number`,
		`{"adopt": ["142"]}`:                                 `c:1: adopt[0]: "142" is the protocol of Podlace's own routes: want boot`,
		`{"apiServer": "192.0.2.1"}`:                         `c:1: apiServer: "192.0.2.1": want a URL`,
		"{\"a%s\": 1}":                                       "c:1: a%s: unknown key; known keys: addressCIDRs, adopt",
		"{\n\"mtu\": 1400":                                   "c:2: the text ends here: a }, a ] or a quote is missing",
		"":                                                   "c:1: the text is empty",
		"[]":                                                 "c:1: a list: want an object",
		"{}\n{}":                                             "c:2: no JSON: invalid character '{' after top-level value",
		`{"` + strings.Repeat("x", 1000) + `": 1}`:           "c:1: \"" + strings.Repeat("x", 40) + "\": unknown",
		"{\"mtu\": 1,\n\"takeover\": true,\n\"adopt\": [\"140x\"]}": "c:3: adopt[0]",
	} {
		_, err := parseConfig("c", []byte(text))
		if err == nil || !strings.Contains(column.ReplaceAllString(err.Error(), "$1"), says) {
			t.Errorf("%q: %v, want %s", text, err, says)
		}
	}
	_, err := parseConfig("c", []byte("{\"mtu\": 1,\n\"takeover\": true,\n\"adopt\": [\"140x\"]}"))
	if err == nil || strings.Count(err.Error(), "\n") != 2 {
		t.Errorf("%v: want all three errors", err)
	}
}

// TestConflistBeside: the conflist in the same folder is read, unless confDir is empty.
func TestConflistBeside(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "config.json")
	put := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := readConfig(file); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("no file: %v", err)
	}
	put(file, "{}")
	if _, err := readConfig(file); err == nil || !strings.Contains(err.Error(), conflistName) || !strings.Contains(err.Error(), "confDir") {
		t.Errorf("no conflist: %v", err)
	}
	for bad, says := range map[string]string{"": ":1:1: the text is empty", "{\n\n": ":3:1: the text ends here",
		"{}":                           ":1:1: want a CNI configuration",
		"[]":                           ":1:1: want a CNI",
		`{"name": "x", "plugins": []}`: ":1:1: want a CNI", `{"name": "x", "plugins": [{"typ": "bridge"}]}`: ":1:1: want a CNI",
		`{"name": "x", "plugins": [{"type": 1}]}`: ":1:1: want a CNI"} {
		put(filepath.Join(dir, conflistName), bad)
		if _, err := readConfig(file); err == nil || !strings.Contains(err.Error(), conflistName+says) {
			t.Errorf("conflist %q: %v", bad, err)
		}
	}
	put(filepath.Join(dir, conflistName), testConflist)
	c, err := readConfig(file)
	if err != nil || string(c.conflist) != testConflist {
		t.Errorf("%v, %q", err, c.conflist)
	}
	put(file, `{"confDir": ""}`)
	if c, err = readConfig(file); err != nil || c.conflist != nil {
		t.Errorf("%v, %q", err, c.conflist)
	}
}

// FuzzConfig: parseConfig returns a usable configuration, or an error that begins with the file's name.
func FuzzConfig(f *testing.F) {
	f.Add([]byte(`{"vxlan": {"vni": 7}, "adopt": ["boot"], "clusterCIDRs": ["10.0.0.0/8"]}`))
	f.Add([]byte(`{"vxlan": {"vni": {}}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := parseConfig("c", text)
		if err != nil && !strings.HasPrefix(err.Error(), "c:") {
			t.Error(err)
		}
		if err == nil && (c.OffLink == "" || c.VXLAN.VNI < 1 || c.VXLAN.Port < 1) {
			t.Errorf("%+v", c)
		}
	})
}

const testConflist = `{"cniVersion": "1.0.0", "name": "podlace", "plugins": [{"type": "podlace-bridge"}, {"type": "podlace-portmap", "capabilities": {"portMappings": true}}]}`

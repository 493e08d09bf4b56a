// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"encoding/json"
	"io"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/portmap"
	"github.com/podlace/podlace/pkg/strict"
)

// documentedDefaults is a page with a table of keys, a configuration, and the function that parses it.
type documentedDefaults struct {
	page, base string
	parse      func(config []byte) (any, error)
}

func pagesWithDefaults() []documentedDefaults {
	request := func(config []byte) *plugin.Request {
		return &plugin.Request{Network: "net", CNIVersion: "1.1.0", Config: config, Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
	}
	const hostLocal = `{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.58.0.0/16"}]]}}`
	return []documentedDefaults{
		{"plugins/bridge/README.md", hostLocal, func(c []byte) (any, error) { return bridge.Parse(request(c)) }},
		{"plugins/host-local/README.md", hostLocal, func(c []byte) (any, error) { return hostlocal.Parse(request(c)) }},
		{"plugins/portmap/README.md", `{}`, func(c []byte) (any, error) { return portmap.Parse(request(c)) }},
		{"plugins/bandwidth/README.md", `{}`, func(c []byte) (any, error) { return bandwidth.Parse(request(c)) }},
		{"plugins/sriov-device-plugin/README.md", `{"resourceName": "fast", "resourcePrefix": "example.com", "selectors": {}}`,
			func(c []byte) (any, error) {
				return pool.Parse(pool.Source{Prefix: "example.com"}, []byte(`{"resourceList": [`+string(c)+`]}`))
			}},
	}
}

// A key that is set to its documented default changes nothing.
func TestDefaults(t *testing.T) {
	n := 0
	for _, page := range pagesWithDefaults() {
		for _, row := range parse(t, page.page).rowsUnder(keysHeading) {
			for _, key := range backquoted(row[0]) {
				if value, ok := literalDefault(row, key); ok {
					page.checkDefault(t, key, value, row[2])
					n++
				}
			}
		}
	}
	if n < 35 {
		t.Errorf("the tables have %d defaults, want 35", n)
	}
}

// literalDefault returns the default of a key if the row of the table has nothing but a value for it.
func literalDefault(row []string, key string) (value string, ok bool) {
	unset := []string{"mtu", "linkDown"} // the code has another value for a missing key, with the same meaning
	if len(row) < 3 || strings.HasPrefix(key, "runtimeConfig.") || slices.Contains(unset, key) {
		return "", false
	}
	values := backquoted(row[1])
	ok = len(values) == 1 && row[1] == "`"+values[0]+"`" && !strings.HasPrefix(values[0], "--")
	return strings.Trim(row[1], "`"), ok
}

func (page documentedDefaults) checkDefault(t *testing.T, key, value, meaning string) {
	t.Helper()
	base := page.base
	switch {
	case strings.HasPrefix(meaning, "Only iptables"):
		base = `{"backend": "iptables"}`
	case strings.HasPrefix(meaning, "With `dra`"):
		base = strings.Replace(base, "{", `{"api": "dra", `, 1)
	}
	path := strings.Split(key, ".")
	want, err := page.parse(configWith(t, base, path, ""))
	if err != nil {
		t.Fatalf("%s: without %s: %v", page.page, key, err)
	}
	got, err := page.parse(configWith(t, base, path, value))
	if diff := cmp.Diff(want, got, cmp.Exporter(func(reflect.Type) bool { return true }), cmpopts.IgnoreTypes(strict.Place{}),
		cmpopts.EquateComparable(), cmpopts.IgnoreFields(portmap.Config{}, "Unset")); err != nil || diff != "" {
		t.Errorf("%s: %s is not the default of %s: correct the table: %v\n%s", page.page, value, key, err, diff)
	}
}

// configWith returns a configuration with a value at a path, or only with the object that contains the key.
func configWith(t *testing.T, base string, path []string, value string) []byte {
	t.Helper()
	root := map[string]any{}
	if err := json.Unmarshal([]byte(base), &root); err != nil {
		t.Fatal(err)
	}
	at := root
	for _, key := range path[:len(path)-1] {
		inner, ok := at[key].(map[string]any)
		if !ok {
			inner = map[string]any{}
		}
		at[key], at = inner, inner
	}
	if last := path[len(path)-1]; value != "" {
		if at[last] = any(value); json.Valid([]byte(value)) {
			at[last] = json.RawMessage(value)
		}
	}
	config, err := json.Marshal(root)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

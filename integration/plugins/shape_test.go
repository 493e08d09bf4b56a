// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// TestResultShape checks the results of the plugins that can run alone, in every version of the specification.
func TestResultShape(t *testing.T) {
	for _, plugin := range []string{"bridge", "host-local", "loopback"} {
		t.Run(plugin, func(t *testing.T) {
			f := harness.NewFixture(t, plugin)
			for _, version := range harness.AllVersions() {
				conf := f.Conf(plugin).With("cniVersion", version, "ipam.routes", []any{object{"dst": "192.0.2.0/24", "mtu": 1400}})
				o := f.Good("ADD", plugin).Config(conf).Run(t).OK(t)
				checkShape(t, plugin, version, harness.RawObject(t, o.Stdout))
				f.Good("DEL", plugin).Config(conf).Run(t).OK(t)
				f.Oracle.Clean(t, version)
			}
		})
	}
}

// TestResultNoVersion: a result for a configuration without a version has the keys of version 0.1.0.
func TestResultNoVersion(t *testing.T) {
	f := harness.NewFixture(t, "bridge")
	for _, version := range []any{nil, ""} {
		conf := f.Conf("bridge").With("cniVersion", version)
		checkShape(t, "bridge", "0.1.0", harness.RawObject(t, f.Good("ADD", "bridge").Config(conf).Run(t).OK(t).Stdout))
		f.Good("DEL", "bridge").Config(conf).Run(t).OK(t)
		f.Oracle.Clean(t, "no cniVersion")
	}
}

// checkShape compares the keys of a result with the keys that the CNI version of the result allows.
func checkShape(t testing.TB, plugin, version string, result object) {
	t.Helper()
	if result["cniVersion"] != version {
		t.Errorf("cniVersion is %v, want %s", result["cniVersion"], version)
	}
	keys := keysOf(nil, "", map[string]any(result))
	allowed := []string{"cniVersion", "dns"}
	switch {
	case version < "0.3.0":
		allowed = append(allowed, "ip4", "ip4.gateway", "ip4.ip", "ip4.routes", "ip4.routes.dst", "ip4.routes.gw", "ip6", "ip6.gateway", "ip6.ip")
		wantKeys(t, plugin, version, keys, "ip4.ip")
	default:
		allowed = append(allowed, "interfaces", "interfaces.name", "interfaces.mac", "interfaces.sandbox",
			"ips", "ips.interface", "ips.address", "ips.gateway", "routes", "routes.dst", "routes.gw")
		wantKeys(t, plugin, version, keys, "ips.address")
	}
	if version >= "0.3.0" && version < "1.0.0" {
		allowed = append(allowed, "ips.version")
		wantKeys(t, plugin, version, keys, "ips.version")
	}
	if version >= "1.1.0" {
		allowed = append(allowed, "interfaces.mtu", "interfaces.socketPath", "interfaces.pciID", "routes.mtu")
	}
	if plugin != "host-local" && version >= "0.3.0" {
		wantKeys(t, plugin, version, keys, "interfaces.name", "interfaces.mac", "interfaces.sandbox", "ips.interface")
	}
	for _, key := range keys {
		if !slices.Contains(allowed, key) {
			t.Errorf("%s: the result has %q, which version %s does not define", plugin, key, version)
		}
	}
}

func wantKeys(t testing.TB, plugin, version string, keys []string, want ...string) {
	t.Helper()
	for _, key := range want {
		if !slices.Contains(keys, key) {
			t.Errorf("%s: the result has no %q, want it in version %s (it has %s)", plugin, key, version, strings.Join(keys, " "))
		}
	}
}

// keysOf returns the dotted paths of all keys; an array adds no level to the path.
func keysOf(keys []string, path string, v any) []string {
	switch v := v.(type) {
	case map[string]any:
		for _, k := range slices.Sorted(maps.Keys(v)) {
			name := strings.TrimPrefix(fmt.Sprintf("%s.%s", path, k), ".")
			keys = keysOf(append(keys, name), name, v[k])
		}
	case []any:
		for _, e := range v {
			keys = keysOf(keys, path, e)
		}
	}
	return keys
}

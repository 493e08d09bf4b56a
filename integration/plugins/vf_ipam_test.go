// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/harness/card"
)

// vfRanges returns a range set with two IPv4 subnets and one with an IPv6 subnet. A VF gets one address from each, the IPv4 address from
// the first subnet.
func vfRanges() []any {
	return []any{[]any{object{"subnet": "198.51.100.0/29"}, object{"subnet": "203.0.113.0/24"}},
		[]any{object{"subnet": "fd00:61::/64", "rangeStart": "fd00:61::100"}}}
}

// TestVFIPAM: VFs get addresses from any IPAM plugin: host-local with several ranges, the reference plugin static, and one whose name
// Podlace does not know. Each interface has its own, CHECK detects a missing one, and no state remains.
func TestVFIPAM(t *testing.T) {
	harness.Need(t, "bridge", "sriov", "host-local")
	harness.Program(t, "ip")
	others := foreignIPAM(t)
	routes := []any{object{"dst": "192.0.2.0/24"}}
	for title, x := range harness.InOrder(map[string]struct {
		ipam object
		want []string // addresses of the first VF
		vfs  int
		uses []string
	}{
		"host-local with several ranges": {object{"type": "host-local", "ranges": vfRanges(), "routes": routes},
			[]string{"198.51.100.2/29", "fd00:61::100/64"}, 2, []string{"chained, reported", "main"}},
		"static": {object{"type": "static", "addresses": []any{object{"address": "198.51.100.9/24"}, object{"address": "fd00:61::9/64"}},
			"routes": routes},
			[]string{"198.51.100.9/24", "fd00:61::9/64"}, 1, []string{"chained", "main"}},
		"foreign": {object{"type": "others-ipam", "ranges": vfRanges(), "routes": routes}, []string{"198.51.100.2/29", "fd00:61::100/64"}, 2,
			[]string{"chained", "main"}},
	}) {
		for _, use := range x.uses {
			t.Run(title+", "+use, func(t *testing.T) {
				card.New(t, x.vfs)
				plugin := object{"type": "sriov", "resources": []any{card.Resource}, "ipam": x.ipam}
				plugins := []any{object{"type": "bridge", "bridge": "vfipam0",
					"ipam": object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.62.0.0/24"}}}}}, plugin}
				switch use {
				case "main":
					plugins = plugins[1:]
				case "chained, reported":
					plugin["reportIPs"] = true
				}
				l := newVFNode(t, object{"cniVersion": "1.1.0", "name": harness.Plain(t), "plugins": plugins}, others, harness.BinDir())
				l.oracle.Options.Ignore = regexp.MustCompile(harness.Harmless + `|^host: folder `)
				l.oracle.Rebase(t)
				if use != "main" { // by a pod without VFs
					l.warmUp(t, func(rt *libcni.RuntimeConf) {
						rt.Args = [][2]string{{"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_NAME", "db-0"}, {"IgnoreUnknown", "1"}}
					})
				}
				l.checkAddresses(t, use, x.want, x.vfs)
			})
		}
	}
}

// foreignIPAM returns a folder with the reference plugins static and host-local, the latter under a name that Podlace does not know.
func foreignIPAM(t *testing.T) (dir string) {
	t.Helper()
	reference := harness.ReferenceDir()
	if !harness.Present(reference, "static") || !harness.Present(reference, "host-local") {
		t.Skip("SKIPPED: the reference's IPAM plugins could not be built")
	}
	dir = t.TempDir()
	for name, program := range map[string]string{"static": "static", "others-ipam": "host-local"} {
		if err := os.Symlink(filepath.Join(reference, program), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// checkAddresses checks the addresses of a pod's VFs over ADD, CHECK and DEL. Those from host-local increase with each pod, that from
// static stays.
func (l vfNode) checkAddresses(t *testing.T, use string, want []string, vfs int) {
	t.Helper()
	rt := harness.Attachment(l.web, l.web.Name, nil)
	result := l.Must(t, "ADD", rt)
	first := map[string]string{"chained": "net1", "chained, reported": "net1", "main": "eth0"}[use]
	var reported []string
	ips, _ := result["ips"].([]any)
	for _, ip := range ips {
		of := ip.(map[string]any)
		i, ok := of["interface"].(float64)
		if !ok {
			t.Fatalf("an address belongs to no interface: %v", of)
		}
		if result["interfaces"].([]any)[int(i)].(map[string]any)["name"] == first {
			reported = append(reported, of["address"].(string))
		}
	}
	if told := use != "chained"; told != slices.Equal(reported, want) || !told && len(reported) > 0 {
		t.Errorf("the result has %q of %s, want %q: %t", reported, first, want, told)
	}
	shown := harness.Shell(t, "ip -n "+l.web.Name+" addr show dev "+first) + harness.Shell(t, "ip -n "+l.web.Name+" route show dev "+first)
	for _, part := range append(slices.Clone(want), "192.0.2.0/24") {
		if !strings.Contains(shown, part) {
			t.Errorf("%s lacks %s: %s", first, part, shown)
		}
	}
	if strings.Contains(shown, "tentative") || strings.Contains(shown, "dadfailed") {
		t.Errorf("not detected: %s", shown)
	}
	second := map[string]string{"eth0": "net1", "net1": "net2"}[first]
	if vfs > 1 {
		if shown := harness.Shell(t, "ip -n "+l.web.Name+" addr show dev "+second); !strings.Contains(shown, "198.51.100.3/29") ||
			!strings.Contains(shown, "fd00:61::101/64") {
			t.Errorf("the second VF: %s", shown)
		}
	}
	l.Must(t, "CHECK", rt)
	harness.Shell(t, "ip -n "+l.web.Name+" addr del "+want[0]+" dev "+first)
	if _, err := l.Do("CHECK", rt, nil); err == nil || !strings.Contains(err.Error(), "is missing on "+first) {
		t.Errorf("CHECK without an address: %v", err)
	}
	l.Must(t, "DEL", rt)
	l.Must(t, "DEL", rt)
	l.checkReturned(t, use)
}

// TestVFStaticRequest: Multus passes the addresses of an annotation, and the IPAM plugin static assigns them.
func TestVFStaticRequest(t *testing.T) {
	harness.Program(t, "ip")
	m := newMultus(t)
	list := object{"cniVersion": "1.0.0", "name": "fast",
		"plugins": []any{object{"type": "sriov", "capabilities": object{"ips": true, "mac": true},
			"ipam": object{"type": "static"}}}}
	d := newDelegate(t, list, card.Address(3), t.TempDir())
	d.CNI = libcni.NewCNIConfigWithCacheDir([]string{foreignIPAM(t), harness.BinDir()}, d.cache, d.Exec())
	rt := multusRuntimeConf(m.pod, "net1", card.Address(3), "", "198.51.100.77/24")
	m.checkInterface(t, d.Must(t, "ADD", rt), "net1", "", "198.51.100.77/24")
	d.Must(t, "CHECK", rt)
	d.Must(t, "DEL", rt)
	m.oracle.Clean(t, "a requested address")
	rt = multusRuntimeConf(m.pod, "net1", card.Address(3), "")
	if _, err := d.Do("ADD", rt, nil); err == nil || harness.Coded(err) != nil {
		t.Errorf("ADD without an address: %v", err)
	}
	m.oracle.Clean(t, "no address was requested")
}

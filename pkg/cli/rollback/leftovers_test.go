// SPDX-License-Identifier: Apache-2.0

package rollback

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/nft"
)

// TestLeftovers removes the bridge, the tables, the lease folder and libcni's results of Podlace's network. A bridge with a port
// or of another network, and a lease folder with a lease, stay.
func TestLeftovers(t *testing.T) {
	dir := t.TempDir()
	put := func(path, text string) {
		t.Helper()
		kerneltest.Must(t, os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600))
	}
	network := func(name, plugins string) reconcile.Network {
		t.Helper()
		sub := filepath.Join(dir, name)
		put(sub+"/a.conflist", `{"cniVersion": "1.0.0", "name": "`+name+`", "plugins": [`+plugins+`]}`)
		list, notes, err := reconcile.Networks(sub)
		if err != nil || len(list) != 1 {
			t.Fatal(list, notes, err)
		}
		return list[0]
	}
	ours := network("left", `{"type": "podlace-bridge", "bridge": "left0", "ipam": {"type": "host-local"}}`)
	const leases, bootFile = "/var/lib/cni/networks/left", "/var/lib/cni/networks/left/podlace_boot"
	const bridge, folder, results, tables = "removed the bridge left0", "removed " + leases, "removed /var/lib/cni/results/left-a-eth0",
		"removed the nftables table bridge podlace_guard"
	t.Cleanup(func() {
		os.RemoveAll(leases)
		_ = netlink.LinkDel(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "left0"}})
	})
	for _, c := range []struct {
		what, lease, stays string
		port               bool
		others             []reconcile.Network
		says               []string
	}{
		{what: "all", says: []string{bridge, folder, results, tables}},
		{what: "a port", port: true, stays: "bridge", says: []string{"the bridge left0 stays: it has the ports port0", folder, results, tables}},
		{what: "a lease", lease: "10.9.0.2", stays: leases, says: []string{bridge, results, tables}},
		{what: "flannel", others: []reconcile.Network{network("other", `{"type": "flannel"}`)}, stays: "bridge",
			says: []string{"the bridge left0 stays: " + filepath.Join(dir, "other/a.conflist") + " may use it", folder, results, tables}},
		{what: "its bridge", others: []reconcile.Network{network("bridge", `{"type": "bridge", "bridge": "left0"}`)}, stays: "bridge",
			says: []string{"the bridge left0 stays: " + filepath.Join(dir, "bridge/a.conflist") + " may use it", folder, results, tables}},
		{what: "another bridge", others: []reconcile.Network{network("own", `{"type": "bridge", "bridge": "own0"}`)},
			says: []string{bridge, folder, results, tables}},
		{what: "the same name", others: []reconcile.Network{network("left", `{"type": "ptp"}`)}, stays: leases + " /var/lib/cni/results/left-a-eth0",
			says: []string{bridge, tables}},
	} {
		_ = netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "left0"}})
		put(leases+"/last_reserved_ip.0", "10.9.0.1")
		put(leases+"/lock", "")
		put(bootFile, "x")
		if c.lease != "" {
			put(filepath.Join(leases, c.lease), "a\r\neth0")
		}
		put("/var/lib/cni/results/left-a-eth0", `{"kind": "cniCacheV1", "containerId": "a", "ifName": "eth0", "networkName": "left"}`)
		table := nft.TableOf(nft.GuardTable)
		conn, err := nft.New()
		kerneltest.Must(t, err)
		conn.AddTable(table.Netlink())
		kerneltest.Must(t, conn.Flush())
		if c.port {
			bridge, err := netlink.LinkByName("left0")
			kerneltest.Must(t, err, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "port0",
				MasterIndex: bridge.Attrs().Index}, PeerName: "port1"}))
		}
		var said []string
		kerneltest.Must(t, Leftovers([]reconcile.Network{ours}, c.others, func(text string) { said = append(said, text) }))
		if got := strings.Join(leftThere(leases), " "); got != c.stays {
			t.Errorf("%s: %s stays, want %s; it said %q", c.what, got, c.stays, said)
		}
		if diff := cmp.Diff(c.says, said); diff != "" {
			t.Errorf("%s: (-want +said)\n%s", c.what, diff)
		}
		if _, err := os.Stat(bootFile); err == nil && c.lease == "" {
			t.Errorf("%s: %s stays", c.what, bootFile)
		}
		_ = netlink.LinkDel(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "port0"}})
		kerneltest.Must(t, os.RemoveAll(leases), os.RemoveAll("/var/lib/cni/results"))
	}
}

// leftThere returns what is left of TestLeftovers' network.
func leftThere(leases string) (list []string) {
	if _, err := netlink.LinkByName("left0"); err == nil {
		list = append(list, "bridge")
	}
	for _, path := range []string{leases, "/var/lib/cni/results/left-a-eth0"} {
		if _, err := os.Stat(path); err == nil {
			list = append(list, path)
		}
	}
	if has, _ := nft.HasTable(nft.GuardTable); has {
		list = append(list, "table")
	}
	return list
}

// TestPodType: the rollback names each file that still names podlace-pod.
func TestPodType(t *testing.T) {
	const cache, config = "/var/lib/cni/results", `{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "podlace-pod"}]}`
	t.Cleanup(func() { kerneltest.Must(t, os.RemoveAll(cache)) })
	conflist := filepath.Join(t.TempDir(), "n.conflist")
	cached, err := json.Marshal(map[string]any{"kind": "cniCacheV1", "containerId": "a", "ifName": "eth0", "networkName": "n",
		"config": []byte(config)})
	kerneltest.Must(t, err, os.MkdirAll(cache, 0o755), os.WriteFile(cache+"/n-a-eth0", cached, 0o600),
		os.WriteFile(conflist, []byte(config), 0o600))
	networks, _, err := reconcile.Networks(filepath.Dir(conflist))
	kerneltest.Must(t, err)
	var out strings.Builder
	kerneltest.Must(t, Run(Options{Networks: networks, Out: &out}))
	for _, want := range []string{"put bridge, portmap and bandwidth in its place in " + conflist, cache + "/n-a-eth0 names podlace-pod: keep it installed"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"encoding/json"
	"net"
	"testing"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// TestOldChain: a hostPort works with cniVersion 0.1.0 and 0.2.0, which old versions of flannel use, and without one, which means 0.1.0.
// Results before 0.3.0 contain no interfaces.
func TestOldChain(t *testing.T) {
	for title, version := range harness.InOrder(map[string]string{"no version": "", "0.1.0": "0.1.0", "0.2.0": "0.2.0"}) {
		for _, backend := range []string{"nftables", "iptables"} {
			t.Run(title+", "+backend, func(t *testing.T) {
				harness.NeedBackend(t, backend)
				var list object
				if err := json.Unmarshal(harness.ChainOf(t, "1.1.0", backend), &list); err != nil {
					t.Fatal(err)
				}
				plugins := list["plugins"].([]any)[:2] // bandwidth requires 0.3.0, as the reference plugin does
				list = list.With("plugins", plugins, "cniVersion", version)
				if version == "" {
					delete(list, "cniVersion")
				}
				oldChain(t, harness.Encode(list))
			})
		}
	}
}

func oldChain(t *testing.T, conflist []byte) {
	t.Helper()
	lan := harness.NewLAN(t)
	n, err := harness.OpenNetwork(conflist, t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	web := harness.NewPod(t, harness.Plain(t)+"-web")
	rt := harness.Named(web, harness.HostPort())
	n.Must(t, "ADD", rt)
	n.Must(t, "DEL", rt)
	before := harness.Watch(t, web)
	result := n.Must(t, "ADD", rt)
	for _, family := range []string{"ip4", "ip6"} {
		if _, ok := result[family]; !ok {
			t.Errorf("the result has no %s: %v", family, result)
		}
	}
	server, err := harness.Serve(web, 80)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	for address, from := range map[string]*sandbox.Pod{harness.NodeV4: lan, harness.NodeV6: lan, "127.0.0.1": nil} {
		harness.Reach(t, from, net.JoinHostPort(address, "8080"), web)
	}
	for range 2 {
		n.Must(t, "DEL", rt)
	}
	before.Clean(t, "DEL")
}

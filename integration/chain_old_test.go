// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"encoding/json"
	"net"
	"testing"

	"github.com/podlace/podlace/pkg/sandbox"
)

// TestOldChain: configurations of before version 0.3.0, such as those of old flannel, work with a hostPort as with the reference. So do those
// without a version, which the specification takes for 0.1.0. Results of these versions name no interfaces.
func TestOldChain(t *testing.T) {
	for title, version := range inOrder(map[string]string{"no version": "", "0.1.0": "0.1.0", "0.2.0": "0.2.0"}) {
		for _, backend := range []string{"nftables", "iptables"} {
			t.Run(title+", "+backend, func(t *testing.T) {
				needBackend(t, backend)
				var list object
				if err := json.Unmarshal(chainOf(t, "1.1.0", backend), &list); err != nil {
					t.Fatal(err)
				}
				plugins := list["plugins"].([]any)[:2] // bandwidth begins with 0.3.0, as the reference's does
				list = list.with("plugins", plugins, "cniVersion", version)
				if version == "" {
					delete(list, "cniVersion")
				}
				oldChain(t, encode(list))
			})
		}
	}
}

func oldChain(t *testing.T, conflist []byte) {
	t.Helper()
	lan := newLAN(t)
	n, err := openNetwork(conflist, t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	web := newPod(t, plain(t)+"-web")
	rt := named(web, hostPort())
	n.must(t, "ADD", rt)
	n.must(t, "DEL", rt)
	before := watch(t, web)
	result := n.must(t, "ADD", rt)
	for _, family := range []string{"ip4", "ip6"} {
		if _, ok := result[family]; !ok {
			t.Errorf("the result has no %s: %v", family, result)
		}
	}
	server, err := serve(web, 80)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	for address, from := range map[string]*sandbox.Pod{nodeV4: lan, nodeV6: lan, "127.0.0.1": nil} {
		reach(t, from, net.JoinHostPort(address, "8080"), web)
	}
	for range 2 {
		n.must(t, "DEL", rt)
	}
	before.clean(t, "DEL")
}

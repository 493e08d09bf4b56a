// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
)

// TestChangeOfForm changes a conflist from the chain to podlace-pod and back while pods run. DEL then comes with the current conflist, as
// from containerd, or with the one cached at ADD, as from CRI-O and podman.
func TestChangeOfForm(t *testing.T) {
	chain := harness.ChainOf(t, "1.1.0", "nftables")
	harness.Need(t, "podlace-pod")
	for name, forms := range map[string][2][]byte{"chain to podlace-pod": {chain, harness.AsPod(chain)},
		"podlace-pod to chain": {harness.AsPod(chain), chain}} {
		for _, cached := range []bool{false, true} {
			t.Run(name+map[bool]string{false: ", DEL by the current conflist", true: ", DEL by the cached one"}[cached], func(t *testing.T) {
				changeForm(t, forms[0], forms[1], cached)
			})
		}
	}
}

func changeForm(t *testing.T, from, to []byte, cached bool) {
	cache := t.TempDir()
	open := func(conflist []byte) *harness.Network {
		n, err := harness.OpenNetwork(conflist, cache, nil)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	old, now := open(from), open(to)
	web, client := harness.NewPod(t, "form-web"), harness.NewPod(t, "form-client")
	rtWeb, rtClient := harness.Attachment(web, "web", harness.Capabilities()), harness.Attachment(client, "client", nil)
	old.Must(t, "ADD", rtWeb)
	old.Must(t, "DEL", rtWeb)
	before := harness.Watch(t, web, client)

	addresses := harness.Addresses(t, old.Must(t, "ADD", rtWeb))
	now.Must(t, "STATUS", nil)
	now.Must(t, "ADD", rtClient)
	now.Must(t, "GC", nil, types.GCAttachment{ContainerID: "web", IfName: "eth0"}, types.GCAttachment{ContainerID: "client", IfName: "eth0"})
	now.Must(t, "CHECK", rtWeb)
	now.Must(t, "CHECK", rtClient)
	harness.ChainTraffic(t, web, client, addresses)
	for _, rt := range []*libcni.RuntimeConf{rtClient, rtWeb} {
		n := now
		if cached {
			conflist, _, err := now.CNI.GetNetworkListCachedConfig(now.List, rt)
			if err != nil {
				t.Fatal(err)
			}
			n = open(conflist)
		}
		n.Must(t, "DEL", rt)
	}
	before.Clean(t, "ADD and DEL in two forms")
}

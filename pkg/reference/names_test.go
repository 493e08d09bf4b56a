// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"slices"
	"testing"

	"github.com/containernetworking/plugins/pkg/utils"

	"github.com/podlace/podlace/pkg/attachment"
)

// TestNames compares the chain names with the reference plugins', and with those on existing nodes, which a new version must still find.
func TestNames(t *testing.T) {
	for _, c := range []struct {
		key    attachment.Key
		digits string
	}{
		{attachment.Key{Network: "podlace", ContainerID: "0123456789abcdef", IfName: "eth0"}, "46d35c6a9e0ed75882799dbb49474a1d"},
		{attachment.Key{Network: "podlace", ContainerID: "0123456789abcdef", IfName: "net1"}, "d954c4bcd4c878d7cbde9680e222f222"},
	} {
		network, id := c.key.Network, c.key.ContainerID
		of := Of(c.key)
		got := []string{Bridge(of).Chain(), Portmap(of).Chain()}
		want := []string{"CNI-" + c.digits[:24], "CNI-DN-" + c.digits[:21]}
		if !slices.Equal(got, want) || len(of.Hashes) != 1 || len(of.Hashes[0]) != 128 {
			t.Errorf("%v: %q, want %q", c.key, got, want)
		}
		of = Of(KeyOf(c.key))
		got = []string{Bridge(of).Chain(), Portmap(of).Chain(), Portmap(of).chains()["CNI-HOSTPORT-SNAT"][0], Bridge(of).commentPrefix()}
		want = []string{utils.FormatChainName(network, id), utils.MustFormatChainNameWithPrefix(network, id, "DN-"),
			utils.MustFormatChainNameWithPrefix(network, id, "SN-"),
			utils.MustFormatHashWithPrefix(16, "", network) + "-" + utils.MustFormatHashWithPrefix(16, "", "eth0:"+id)}
		if !slices.Equal(got, want) {
			t.Errorf("%v: %q, the reference has %q", c.key, got, want)
		}
		if all := Bridge(Unrecorded(c.key, "bridge")).chains()[postrouting]; all[0] != Bridge(Of(c.key)).Chain() || all[len(all)-1] != want[0] {
			t.Errorf("%v: an attachment without a record has %q", c.key, all)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"net"
	"net/netip"
	"regexp"
	"strings"
	"testing"

	"github.com/containernetworking/plugins/pkg/ip"
	"github.com/containernetworking/plugins/pkg/link"
	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
)

// TestMasqueradeOfTheReference compares the rules that a rollback writes with those of the reference plugin's own function. In the second
// case their comment is too long and is truncated.
func TestMasqueradeOfTheReference(t *testing.T) {
	backend := "nftables"
	var addresses []netip.Prefix
	var nets []*net.IPNet
	for _, text := range []string{"10.9.0.2/24", "10.8.0.2/20", "fd00::2/64"} {
		addresses = append(addresses, netip.MustParsePrefix(text))
		address, of, err := net.ParseCIDR(text)
		kerneltest.Must(t, err)
		nets = append(nets, &net.IPNet{IP: address, Mask: of.Mask})
	}
	for _, id := range []string{"a", strings.Repeat("0123456789abcdef", 15)} {
		key := attachment.Key{Network: "net", ContainerID: id, IfName: "eth0"}
		want := writtenObjects(t, func() error { return ip.SetupIPMasqForNetworks(&backend, nets, key.Network, key.IfName, id) })
		got := writtenObjects(t, func() error { return Bridge(Of(key)).WriteMasquerade(addresses, nil) })
		if diff := cmp.Diff(want, got); diff != "" || len(want) < 10 {
			t.Errorf("container %s: %d records\n%s", id, len(want), diff)
		}
	}
}

// TestSpoofCheckOfTheReference compares the chains that a rollback writes with those of the reference plugin's own function.
func TestSpoofCheckOfTheReference(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	key := attachment.Key{Network: "net", ContainerID: "a", IfName: "eth0"}
	want := writtenObjects(t, link.NewSpoofChecker("veth0", mac.String(), key.ContainerID+"-"+key.IfName).Setup)
	got := writtenObjects(t, func() error { return Bridge(Of(key)).WriteSpoofCheck("veth0", mac) })
	if diff := cmp.Diff(want, got); diff != "" || len(want) < 8 {
		t.Errorf("%d records\n%s", len(want), diff)
	}
}

// writtenObjects returns the tables, chains and rules that write creates, without comments of tables and chains.
func writtenObjects(t *testing.T, write func() error) (records []string) {
	t.Helper()
	pipeTo(t, "flush ruleset", "nft", "-f", "-")
	t.Cleanup(func() { kerneltest.EmptyNFT(t) })
	kerneltest.Must(t, write())
	comment := regexp.MustCompile(`^(nft (?:table|chain) .*) userdata=.*`)
	for _, line := range kerneltest.Records(t, "nft ") {
		records = append(records, comment.ReplaceAllString(line, "$1"))
	}
	return records
}

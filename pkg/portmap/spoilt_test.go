// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/nft"
)

// Unread replies that a failed request left in the netlink socket do not reach the next one.
func TestSpoiltSocket(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	a, b := portList("tcp 8080 10.1.0.5:80"), portList("tcp 8081 10.1.0.6:80")
	kerneltest.Must(t, addPorts(h, ownerA, "kt0", a), addPorts(h, ownerB, "kt0", b))
	n, err := h.NFT.Open(nft.HostportTable)
	kerneltest.Must(t, err)
	first := ownedPorts{Ports: a, Owner: ownerA}.elements()[0]
	if _, err := n.Find([]nft.Element{{Set: first.Set, Key: []byte("too long for a key")}, first}); err == nil || nft.Unsupported(err) {
		t.Fatalf("error %v", err)
	}
	kerneltest.Must(t, checkPorts(h, ownerB, b), delPorts(h, ownerB, b))
	if lines := recordLines(t, "nft element inet "+nft.HostportTable+" ports4"); len(lines) != 1 {
		t.Errorf("got %q", lines)
	}
}

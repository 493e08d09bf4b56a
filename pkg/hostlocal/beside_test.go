// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// TestSharedRange: ADD creates no file for an address that another network on the bridge has leased. If the range is full, the error names
// the other network.
func TestSharedRange(t *testing.T) {
	l := newQuickLab(t, `"subnet":"10.1.2.0/27"`)
	other := labIn(t, l.netns, strings.TrimSuffix(l.dir, "/"+l.network), `"subnet":"10.1.2.0/27"`)
	for _, network := range []string{l.network, other.network} {
		kerneltest.Must(t, attachment.WriteNote(network, ipam.BridgeNote(ipam.DefaultBridge), ""))
		t.Cleanup(func() { kerneltest.Must(t, store.RemoveAll(store.Root+"/"+network)) })
	}
	other.fillFolder(netip.MustParseAddr("10.1.2.2"), 28)
	l.put("last_reserved_ip.0", "10.1.2.1")
	created := eventCounts(t, l.dir, unix.IN_CREATE, func() { l.mustGive("a", "10.1.2.30/27") })
	for name := range created {
		if strings.HasPrefix(name, "10.") && name != "10.1.2.30" {
			t.Errorf("created %s", name)
		}
	}
	full := l.call("ADD", "b", "")
	l.mustFail(full, plugin.CodeExhausted, "no IP addresses available in range set")
	if want := "; networks " + other.network + " on this bridge share the range; "; !strings.Contains(full.Detail, want) {
		t.Errorf("details %q, want %q", full.Detail, want)
	}
}

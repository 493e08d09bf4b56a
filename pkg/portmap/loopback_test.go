// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/ports"
)

// The rules that protect 127.0.0.0/8 have their own nftables table.
func TestProtectLoopback(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	for range 2 {
		kerneltest.Must(t, ProtectLoopback(h))
		if lines := recordLines(t, "nft rule inet "+nft.LoopbackTable+" prerouting", "immediate"); len(lines) != 2 {
			t.Errorf("got %q", lines)
		}
	}
}

// loopbackState checks route_localnet of the bridges kt0 and kt1 and the number of rules that protect 127.0.0.0/8.
func loopbackState(t *testing.T, h *kernel.Node, want string) {
	t.Helper()
	zero, err := h.Get("ipv4/conf/kt0/route_localnet")
	one, err1 := h.Get("ipv4/conf/kt1/route_localnet")
	rules := len(recordLines(t, "nft rule inet "+nft.LoopbackTable, "immediate"))
	if got := fmt.Sprintf("%s %s %d", zero, one, rules); got != want || err != nil || err1 != nil {
		t.Errorf("got %s, want %s; %v %v", got, want, err, err1)
	}
}

// The last DEL on a link disables route_localnet, unless another program enabled it; the last one on the node removes the rules that
// protect 127.0.0.0/8 (S-04).
func TestLoopbackUsers(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	t.Cleanup(func() { kerneltest.Must(t, os.RemoveAll(loopbackUsers)) })
	for _, link := range []string{"kt0", "kt1"} {
		addBridge(t, link)
	}
	state := func(want string) {
		t.Helper()
		loopbackState(t, h, want)
	}

	a, b := strings.Fields(ownerA)[0], strings.Fields(ownerB)[0]
	state("0 0 0")
	kerneltest.Must(t, OpenLoopback(h, a, "kt0"), OpenLoopback(h, a, "kt0"), OpenLoopback(h, b, "kt0"), OpenLoopback(h, b, "kt1"))
	state("2 2 2")
	closeFor := func(owner, link string) error { return delHostPorts(h, ownedPorts{Owner: owner, Localhost: link}) }
	kerneltest.Must(t, closeFor(ownerA, "kt1"), delPorts(h, ownerA, nil))
	state("2 2 2")
	_, err := delOwnedHostPorts(h, ownerHash(ownerB))
	kerneltest.Must(t, err)
	state("2 0 2")
	kerneltest.Must(t, closeFor(ownerB, "kt0"))
	state("2 0 2")
	kerneltest.Must(t, closeFor(ownerA, "kt0"))
	state("0 0 0")
	if _, err := os.Stat(loopbackUsers); err == nil {
		if left, _ := readNames(loopbackUsers, -1); len(left) > 0 {
			t.Errorf("left %q", left)
		}
	}
	kerneltest.Must(t, h.Set(kernel.Sysctl{Path: "ipv4/conf/kt1/route_localnet", Value: "1"}), OpenLoopback(h, a, "kt1"),
		OpenLoopback(h, b, "kt1"),
		closeFor(ownerA, "kt1"))
	state("0 1 2")
	kerneltest.Must(t, closeFor(ownerB, "kt1"))
	state("0 1 0")
	kerneltest.Must(t, ProtectLoopback(h), closeFor(ownerB, "kt1")) // another program opened the link
	state("0 1 0")
	if left, _ := readNames(loopbackUsers, -1); len(left) > 0 {
		t.Errorf("left %q", left)
	}
}

// TestLoopbackRemovals: what closeLoopback and forgetUsers remove is in the debug log, and a sweep of faults meets it.
func TestLoopbackRemovals(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	t.Cleanup(func() { kerneltest.Must(t, os.RemoveAll(loopbackUsers)) })
	var log bytes.Buffer
	before := slog.Default()
	t.Cleanup(func() { slog.SetDefault(before) })
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})))
	for _, remove := range []func() error{
		func() error { _, _, err := closeLoopback(h, "a", anyLink); return err },
		func() error { return forgetUsers(nil) },
	} {
		kerneltest.Must(t, os.MkdirAll(loopbackUsers+"/kt0", 0o700))
		log.Reset()
		kerneltest.Must(t, remove())
		if !strings.Contains(log.String(), `op="remove `+loopbackUsers+`/kt0"`) {
			t.Errorf("log %q", log.String())
		}
	}
}

// Without the files in loopbackUsers, Podlace looks for hostPorts in the kernel (S-04): links keep route_localnet, and 127.0.0.0/8 its
// protection, also after a flush, until the last DEL. A link that another program opened stays open.
func TestLoopbackUsersLost(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	t.Cleanup(func() { kerneltest.Must(t, os.RemoveAll(loopbackUsers)) })
	for _, link := range []string{"kt0", "kt1"} {
		addBridge(t, link)
	}
	state := func(want string) {
		t.Helper()
		loopbackState(t, h, want)
	}

	open := func(owner, link string, port uint16) {
		t.Helper()
		kerneltest.Must(t, restored(h, nil), OpenLoopback(h, ownerHash(owner), link),
			addAll(h, ownedPorts{Owner: owner, Ports: []ports.Port{{Protocol: "tcp", Port: port, To: netip.MustParseAddrPort("10.1.1.1:80")}}}))
	}
	lose := func() { t.Helper(); kerneltest.Must(t, os.RemoveAll(loopbackUsers)) }
	del := func(owner string) {
		t.Helper()
		_, err := delOwnedHostPorts(h, ownerHash(owner))
		kerneltest.Must(t, err)
	}

	open(ownerA, "kt0", 1)
	open(ownerB, "kt1", 2)
	lose()
	kerneltest.Must(t, restoreLoopback(h, nil))
	state("2 2 2")
	del(ownerA)
	state("2 2 2")
	del(ownerB)
	state("0 0 0")

	kerneltest.Must(t, h.Set(kernel.Sysctl{Path: "ipv4/conf/kt1/route_localnet", Value: "1"}))
	open(ownerA, "kt0", 1)
	open(ownerB, "kt1", 2)
	lose()
	kerneltest.EmptyNFT(t)
	state("2 1 0")
	kerneltest.Must(t, restoreLoopback(h, []string{ownerHash(ownerA), ownerHash(ownerB)}))
	state("0 1 0")

	open(ownerA, "kt0", 1)
	kerneltest.EmptyNFT(t)
	kerneltest.Must(t, restoreLoopback(h, []string{ownerHash(ownerA)}))
	state("2 1 2")
	kerneltest.Must(t, leaveLoopbackOpen(h, "kt0"), restoreLoopback(h, nil))
	state("1 1 0")
}

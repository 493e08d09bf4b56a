// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/nft"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

func pipeTo(t *testing.T, text string, command ...string) {
	t.Helper()
	path, err := exec.LookPath(command[0])
	if err != nil {
		if os.Getenv("KERNELTEST") == "require" {
			t.Fatal(err)
		}
		t.Skipf("SKIPPED: %v", err)
	}
	cmd := exec.Command(path, command[1:]...)
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s\n%s", command, err, out, text)
	}
}

// leftBy returns what several versions of the reference plugins leave for a container, as input for nft(8) and iptables-restore(8).
func leftBy(hash, masquerade, id, address, port string) (nft, iptables string) {
	words := strings.NewReplacer("HASH24", hash[:24], "HASH21", hash[:21], "MASQ", masquerade, "ID", id, "ADDR", address, "NUMBER", port)
	return words.Replace(`
table inet cni_plugins_masquerade {
	chain masq_checks { ip saddr ADDR ip daddr != 10.9.0.0/16 masquerade comment "MASQ, net: n, if: eth0, id: ID"; }
}
table bridge nat {
	chain PREROUTING { type filter hook prerouting priority -300; }
	chain cni-br-iface-ID-eth0-mac { ether saddr 02:00:00:00:00:01 return comment "macspoofchk-ID-eth0"; drop; }
	chain cni-br-iface-ID-eth0 { jump cni-br-iface-ID-eth0-mac comment "macspoofchk-ID-eth0"; }
}
add rule bridge nat PREROUTING iifname "vethID" jump cni-br-iface-ID-eth0 comment "macspoofchk-ID-eth0"
table ip cni_hostport {
	chain hostports { tcp dport NUMBER dnat to ADDR:80 comment "ID"; }
	chain hostip_hostports { ip daddr 192.0.2.1 tcp dport NUMBER dnat to ADDR:80 comment "ID"; }
	chain input { type nat hook input priority 100; ip saddr ADDR return comment "ID"; }
	chain masquerading { type nat hook postrouting priority 100; ip saddr ADDR ip daddr ADDR masquerade comment "ID"; }
}
`), strings.NewReplacer("HASH24", hash[:24], "HASH21", hash[:21], "ID", id, "ADDR", address, "NUMBER", port).Replace(`*nat
:CNI-HASH24 -
:CNI-DN-HASH21 -
:CNI-SN-HASH21 -
-A POSTROUTING -s ADDR/16 -m comment --comment "name: \"n\" id: \"ID\"" -j CNI-HASH24
-A POSTROUTING -s ADDR -j CNI-HASH24
-A CNI-HASH24 -d 10.9.0.0/16 -j ACCEPT
-A CNI-HASH24 ! -d 224.0.0.0/4 -j MASQUERADE
-A CNI-HOSTPORT-DNAT -p tcp -m multiport --dports NUMBER -j CNI-DN-HASH21
-A CNI-DN-HASH21 -p tcp --dport NUMBER -j DNAT --to-destination ADDR:80
-A CNI-HOSTPORT-SNAT -p tcp -s 127.0.0.1 -m multiport --dports 80 -j CNI-SN-HASH21
-A CNI-SN-HASH21 -s 127.0.0.1 -d ADDR -p tcp --dport 80 -j MASQUERADE
COMMIT
`)
}

// TestDelReference (F-44) expects DEL to remove the rules of all versions of the reference plugins, and to keep those of other attachments.
func TestDelReference(t *testing.T) {
	kerneltest.EmptyNFT(t)
	hash := func(digit string) string { return strings.Repeat(digit, 24) }
	gone := Attachment{Key: attachment.Key{Network: "n", ContainerID: "gone", IfName: "eth0"}, Hashes: []string{hash("a")}}
	kept := Attachment{Key: attachment.Key{Network: "n", ContainerID: "kept", IfName: "eth0"}, Hashes: []string{hash("b")}}
	pipeTo(t, "*nat\n:CNI-HOSTPORT-DNAT -\n:CNI-HOSTPORT-SNAT -\nCOMMIT\n", "iptables-restore", "--noflush")
	for _, one := range []struct {
		ref           Attachment
		address, port string
	}{{kept, "10.9.0.2", "8080"}, {gone, "10.9.0.3", "8081"}} {
		nft, iptables := leftBy(one.ref.Hashes[0], Bridge(one.ref).commentPrefix(), one.ref.ContainerID, one.address, one.port)
		pipeTo(t, nft, "nft", "-f", "-")
		pipeTo(t, iptables, "iptables-restore", "--noflush")
	}
	keptBefore, goneBefore := linesAbout("kept", hash("b"))(t), linesAbout("gone", hash("a"))(t)
	if len(goneBefore) != 22 || len(keptBefore) != len(goneBefore) {
		t.Fatalf("%d and %d rules and chains to begin with:\n%s", len(keptBefore), len(goneBefore), strings.Join(goneBefore, "\n"))
	}
	for range 2 {
		kerneltest.Must(t, Bridge(gone).Remove(), Portmap(gone).Remove())
	}
	if left := linesAbout("gone", hash("a"))(t); len(left) > 0 {
		t.Errorf("left:\n%s", strings.Join(left, "\n"))
	}
	if now := linesAbout("kept", hash("b"))(t); len(now) != len(keptBefore) {
		t.Errorf("of the other attachment there were %d rules and chains, are %d", len(keptBefore), len(now))
	}
	for what, masqueraded := range map[netip.Addr]bool{netip.MustParseAddr("10.9.0.2"): true, netip.MustParseAddr("10.9.0.9"): false} {
		if ok, err := Bridge(kept).HasMasquerade(what); ok != masqueraded || err != nil {
			t.Errorf("%s is masqueraded: %t, %v", what, ok, err)
		}
	}
}

func TestHasMasquerade(t *testing.T) {
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) {
			kerneltest.EmptyNFT(t)
			ref := Attachment{Key: attachment.Key{Network: "n", ContainerID: "masq", IfName: "eth0"}, Hashes: []string{strings.Repeat("d", 24)}}
			nft, iptables := leftBy(ref.Hashes[0], Bridge(ref).commentPrefix(), ref.ContainerID, "10.9.0.2", "8080")
			if backend == "nftables" {
				pipeTo(t, nft, "nft", "-f", "-")
			} else {
				pipeTo(t, "*nat\n:CNI-HOSTPORT-DNAT -\n:CNI-HOSTPORT-SNAT -\nCOMMIT\n"+iptables, "iptables-restore", "--noflush")
			}
			for address, want := range map[string]bool{"10.9.0.2": true, "10.9.0.3": false} {
				if has, err := Bridge(ref).HasMasquerade(netip.MustParseAddr(address)); has != want || err != nil {
					t.Errorf("%s: %t, %v", address, has, err)
				}
			}
		})
	}
}

// TestDelReferenceLegacy removes chains of legacy xtables, which needs the iptables program.
func TestDelReferenceLegacy(t *testing.T) {
	if _, err := os.ReadFile("/proc/thread-self/net/ip_tables_names"); errors.Is(err, fs.ErrPermission) {
		t.Skip("SKIPPED: the kernel does not list legacy tables for an ordinary user")
	}
	ref := Attachment{Key: attachment.Key{Network: "n", ContainerID: "gone", IfName: "eth0"}, Hashes: []string{strings.Repeat("c", 24)}}
	_, rules := leftBy(ref.Hashes[0], "", "gone", "10.9.0.3", "8081")
	pipeTo(t, "*nat\n:CNI-HOSTPORT-DNAT -\n:CNI-HOSTPORT-SNAT -\nCOMMIT\n", "iptables-legacy-restore", "--noflush")
	t.Cleanup(func() { pipeTo(t, "*nat\nCOMMIT\n", "iptables-legacy-restore") })
	nat := func() []string {
		t.Helper()
		now, err := iptables.ListLegacy(true, "POSTROUTING", HostportChain, "CNI-HOSTPORT-SNAT", Bridge(ref).Chain(), Portmap(ref).Chain(),
			Portmap(ref).chains()["CNI-HOSTPORT-SNAT"][0])
		kerneltest.Must(t, err)
		var lines []string
		for chain, own := range now {
			lines = append(append(lines, chain), own...)
		}
		return slices.DeleteFunc(lines, func(line string) bool { return !strings.Contains(line, ref.Hashes[0][:21]) })
	}
	pipeTo(t, rules, "iptables-legacy-restore", "--noflush")
	if before := nat(); len(before) != 11 {
		t.Fatalf("%d lines to begin with:\n%s", len(before), strings.Join(before, "\n"))
	}
	if ok, err := Bridge(ref).HasMasquerade(netip.MustParseAddr("10.9.0.3")); !ok || err != nil {
		t.Errorf("masqueraded: %t, %v", ok, err)
	}
	for range 2 {
		kerneltest.Must(t, Bridge(ref).Remove(), Portmap(ref).Remove())
	}
	if left := nat(); len(left) > 0 {
		t.Errorf("left:\n%s", strings.Join(left, "\n"))
	}
}

// linesAbout returns a function that lists everything about a container in the node's tables.
func linesAbout(id, hash string) func(*testing.T) []string {
	return func(t *testing.T) (lines []string) {
		for _, line := range kerneltest.Records(t, "nft ") {
			if strings.HasPrefix(line, "nft ") && (strings.Contains(line, hash[:21]) || strings.Contains(line, id)) {
				lines = append(lines, line)
			}
		}
		return lines
	}
}

// TestTwoNetworksOfOneContainer: DEL in one network keeps the other's hostPorts, although their rules contain only the container ID.
func TestTwoNetworksOfOneContainer(t *testing.T) {
	kerneltest.EmptyNFT(t)
	pipeTo(t, `table ip cni_hostport { chain hostports {
		tcp dport 8080 dnat to 10.9.0.2:80 comment "c"; tcp dport 8081 dnat to 10.8.0.2:80 comment "c"; }; }`, "nft", "-f", "-")
	ref := Attachment{Key: attachment.Key{Network: "n", ContainerID: "c", IfName: "eth0"},
		Addresses: []netip.Addr{netip.MustParseAddr("10.8.0.2")}}
	kerneltest.Must(t, Portmap(ref).Remove())
	left, err := mustNFT(t).Rules(portRules(true))
	if err != nil || len(left) != 1 || !left[0].Has([]byte{10, 9, 0, 2}) {
		t.Errorf("left %v, %v", left, err)
	}
	ref.Addresses = nil
	kerneltest.Must(t, Portmap(ref).Remove())
	if left, err = mustNFT(t).Rules(portRules(true)); err != nil || len(left) != 0 {
		t.Errorf("without addresses: left %v, %v", left, err)
	}
}

func mustNFT(t *testing.T) *nft.Handle {
	t.Helper()
	n, err := nft.Open("")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return n
}

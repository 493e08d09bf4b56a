// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

const (
	ownerA = "aaaaaaaaaaaaaaaa shop/web-0"
	ownerB = "bbbbbbbbbbbbbbbb shop/web-1"
)

// portFrom parses a mapping such as "tcp 8080 10.1.0.5:80" or "udp 192.0.2.1:53 10.1.0.5:53".
func portFrom(text string) ports.Port {
	words := strings.Fields(text)
	p := ports.Port{Protocol: words[0], To: netip.MustParseAddrPort(words[2]), SNAT: true}
	if at, err := netip.ParseAddrPort(words[1]); err == nil {
		p.HostIP, p.Port = at.Addr(), at.Port()
		return p
	}
	if _, err := fmt.Sscan(words[1], &p.Port); err != nil {
		panic(err)
	}
	return p
}

func portList(texts ...string) (out []ports.Port) {
	for _, text := range texts {
		out = append(out, portFrom(text))
	}
	return out
}

func addPorts(h *kernel.Node, owner, bridge string, ports []ports.Port) error {
	return addAll(h, ownedPorts{Owner: owner, Bridge: bridge, Ports: ports})
}

// addAll creates missing rules and then adds the ports.
func addAll(h *kernel.Node, own ownedPorts) error {
	log := slog.New(slog.DiscardHandler)
	if err := ensureRules(h, log); err != nil {
		return err
	}
	want := portClaim{own, "", ""}
	p, err := planFor(h, want)
	if err != nil {
		return err
	}
	return applyPlan(h, want, p)
}

func delHostPorts(h *kernel.Node, own ownedPorts) error {
	elements, err := ownedBy(h, own)
	if err != nil {
		return err
	}
	return endOwned(h, ownerHash(own.Owner), own.Localhost, elements)
}

func delPorts(h *kernel.Node, owner string, ports []ports.Port) error {
	return delHostPorts(h, ownedPorts{Owner: owner, Ports: ports})
}

func isTaken(err error) bool { return plugin.Code(err) == plugin.CodePortConflict }

func isDifferent(err error) bool { return plugin.Code(err) == plugin.CodeStateDiffers }

func checkPorts(h *kernel.Node, owner string, ports []ports.Port) error {
	return checkHostPorts(h, ownedPorts{Owner: owner, Ports: ports}, otherOwners{"", map[string]otherOwner{}})
}

// portElements returns the elements of all nftables sets for ports.
func portElements(t *testing.T) (lines []string) {
	t.Helper()
	for _, line := range recordLines(t, "nft element inet "+nft.HostportTable) {
		if !strings.Contains(line, " hairpin ") && !strings.Contains(line, " owners ") && !strings.Contains(line, " "+"schema"+" ") {
			lines = append(lines, line)
		}
	}
	return lines
}

func TestTablePorts(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	a := portList("tcp 8080 10.1.0.5:80", "udp 8080 10.1.0.5:80", "tcp 8080 [fd00::5]:80", "tcp 192.0.2.1:8081 10.1.0.5:81",
		"sctp 9 10.1.0.5:9")
	b := portList("tcp 8082 10.1.0.6:80", "tcp 192.0.2.2:8081 10.1.0.6:81", "udp 8081 10.1.0.6:81")
	empty := func() { // as before: only the result of nft.Build
		t.Helper()
		if left := portElements(t); len(left) > 0 {
			t.Errorf("left %q", left)
		}
	}
	if err := checkPorts(h, ownerA, a); !isDifferent(err) {
		t.Errorf("before ADD: %v", err)
	}
	kerneltest.Must(t, delPorts(h, ownerA, a)) // the table does not exist yet
	kerneltest.Must(t, addPorts(h, ownerA, "kt0", a), addPorts(h, ownerB, "kt0", b))
	kerneltest.Must(t, checkPorts(h, ownerA, a), checkPorts(h, ownerB, b))
	if err := checkPorts(h, ownerB, a); !isDifferent(err) || !strings.Contains(err.Error(), "now belongs to shop/web-0") {
		t.Errorf("as another: %v", err)
	}
	kerneltest.Must(t, delPorts(h, ownerB, a), checkPorts(h, ownerA, a)) // deletes only the owner's ports
	kerneltest.Must(t, addPorts(h, ownerB, "kt0", b))                    // DEL ends an owner, whatever ports it names
	kerneltest.Must(t, delPorts(h, ownerA, a), checkPorts(h, ownerB, b))
	kerneltest.Must(t, delPorts(h, ownerB, b))
	empty()
	kerneltest.Must(t, delPorts(h, ownerB, b), delPorts(h, ownerB, nil))
	empty()
}

func TestCheckHostPorts(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	kerneltest.Must(t, addPorts(h, ownerA, "kt0", portList("tcp 8080 10.1.0.5:80")))
	elsewhere, noSNAT := portFrom("tcp 8080 10.1.0.5:81"), portFrom("tcp 8080 10.1.0.5:80")
	noSNAT.SNAT = false
	kerneltest.Must(t, checkPorts(h, ownerA, []ports.Port{noSNAT}))
	if err := checkPorts(h, ownerA, []ports.Port{elsewhere}); !isDifferent(err) || !strings.Contains(err.Error(), "leads elsewhere") {
		t.Errorf("got %v", err)
	}
	kerneltest.Must(t, delPorts(h, ownerA, []ports.Port{noSNAT}))
	kerneltest.Must(t, addPorts(h, ownerA, "kt0", []ports.Port{noSNAT}))
	masqAll := noSNAT
	masqAll.SNAT, masqAll.MasqAll = true, true
	if err := checkPorts(h, ownerA, []ports.Port{masqAll}); !isDifferent(err) || !strings.Contains(err.Error(), "masqall4") {
		t.Errorf("got %v", err)
	}
}

// If two attachments request the same port, the first keeps it and the second gets no port at all.
func TestHostPortClash(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	kerneltest.Must(t, addPorts(h, ownerA, "kt0", portList("tcp 8080 10.1.0.5:80", "udp 192.0.2.1:53 10.1.0.5:53", "tcp 443 [fd00::5]:443")))
	before := portElements(t)
	for text, says := range map[string]string{
		"tcp 8080 10.1.0.6:80":         "hostPort tcp 8080 is in use by shop/web-0",
		"tcp 8080 10.1.0.5:80":         "hostPort tcp 8080 is in use by shop/web-0",
		"udp 192.0.2.1:53 10.1.0.6:53": "hostPort udp 192.0.2.1:53 is in use by shop/web-0",
		"tcp 443 [fd00::6]:443":        "hostPort tcp 443 is in use by shop/web-0",
	} {
		err := addPorts(h, ownerB, "kt0", portList("tcp 9090 10.1.0.6:80", text))
		if !isTaken(err) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", text, err)
		}
	}
	if diff := cmp.Diff(before, portElements(t)); diff != "" {
		t.Errorf("what changed:\n%s", diff)
	}
	// Another protocol, address or family is no conflict.
	kerneltest.Must(t, addPorts(h, ownerB, "kt0", portList("udp 8080 10.1.0.6:80", "udp 192.0.2.2:53 10.1.0.6:53", "tcp 443 10.1.0.6:443",
		"tcp 8080 [fd00::6]:80")))
}

// Replacing an attachment's ports gives the same result whatever the previous ones were.
func TestReplaceOwn(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	kerneltest.Must(t, addPorts(h, ownerA, "kt0", portList("tcp 8080 10.1.0.5:80", "tcp 8081 10.1.0.5:81")))
	next := portList("tcp 8080 10.1.0.9:80", "tcp 8082 10.1.0.9:82")
	renamed := strings.Fields(ownerA)[0] + " shop/renamed"
	for range 2 {
		kerneltest.Must(t, addPorts(h, renamed, "kt0", next), checkPorts(h, renamed, next))
	}
	if lines := recordLines(t, "nft element", " ports4 ", "1f90"); len(lines) != 1 || !strings.Contains(lines[0], "0a010009") {
		t.Errorf("got %q", lines)
	}
}

// After a flush that also removed the static rules, the next ADD writes all rules again.
func TestAfterFlush(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	ports := portList("tcp 8080 10.1.0.5:80", "tcp 8080 [fd00::5]:80")
	staticLines := func() []string {
		return append(recordLines(t, "nft chain inet "+nft.HostportTable),
			append(recordLines(t, "nft rule inet "+nft.HostportTable), recordLines(t, "nft set inet "+nft.HostportTable)...)...)
	}
	kerneltest.Must(t, addPorts(h, ownerA, "kt0", ports))
	whole := staticLines()
	if len(whole) < 20 {
		t.Errorf("the static rules have %d lines", len(whole))
	}
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	c.FlushRuleset()
	kerneltest.Must(t, c.Flush())
	kerneltest.Must(t, delPorts(h, ownerA, ports))
	if err := checkPorts(h, ownerA, ports); !isDifferent(err) {
		t.Errorf("got %v", err)
	}
	kerneltest.Must(t, addPorts(h, ownerA, "kt0", ports), checkPorts(h, ownerA, ports))
	if diff := cmp.Diff(whole, staticLines()); diff != "" {
		t.Errorf("the static rules differ:\n%s", diff)
	}
}

// Two first pods at the same time create the static rules only once.
func TestTableTwice(t *testing.T) {
	kerneltest.EmptyNFT(t)
	for range 3 {
		kerneltest.Must(t, HostportSchema().Install(nil))
	}
	if lines := recordLines(t, "nft rule inet "+nft.HostportTable+" prerouting"); len(lines) != 1 {
		t.Errorf("got %d rules: %q", len(lines), lines)
	}
}

// Rules of another schema version are replaced, and the existing ports stay.
func TestSchema(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	a := portList("tcp 8080 10.1.0.5:80")
	kerneltest.Must(t, addPorts(h, ownerA, "kt0", a))
	rules := recordLines(t, "nft rule inet "+nft.HostportTable)
	n, err := nft.Open(nft.HostportTable)
	kerneltest.Must(t, err)
	defer n.Close()
	mark := []nft.Element{{Set: "schema", Key: nft.BigEndian(HostportSchema().Version)}}
	c, err := nftables.New()
	kerneltest.Must(t, err)
	c.FlushChain(&nftables.Chain{Table: &nftables.Table{Name: nft.HostportTable, Family: nftables.TableFamilyINet}, Name: "prerouting"})
	kerneltest.Must(t, c.Flush(), n.Delete(mark), n.Add([]nft.Element{{Set: "schema", Key: nft.BigEndian(HostportSchema().Version + 1)}}))
	kerneltest.Must(t, addPorts(h, ownerB, "kt0", portList("tcp 8081 10.1.0.6:80")), checkPorts(h, ownerA, a))
	if diff := cmp.Diff(rules, recordLines(t, "nft rule inet "+nft.HostportTable)); diff != "" {
		t.Error(diff)
	}
	if lines := recordLines(t, "nft element inet "+nft.HostportTable+" "+"schema"+" "); len(lines) != 1 {
		t.Errorf("marks %q", lines)
	}
}

// Consecutive ports are one set element, which conflicts with single ports and other ranges.
func TestRange(t *testing.T) {
	kerneltest.Slow(t)
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	long := func(first, last uint16, to string) ports.Port {
		return ports.Port{Protocol: "udp", Port: first, Last: last, To: netip.AddrPortFrom(netip.MustParseAddr(to), first), SNAT: true,
			MasqAll: true}
	}
	a := []ports.Port{long(1000, 1999, "10.1.0.5"), long(1000, 1999, "fd00::5")}
	kerneltest.Must(t, addPorts(h, ownerA, "kt0", a), checkPorts(h, ownerA, a), addPorts(h, ownerA, "kt0", a))
	for _, c := range []struct {
		port  ports.Port
		clash bool
	}{
		{portFrom("udp 1500 10.1.0.6:80"), true}, {portFrom("udp 1000 10.1.0.6:80"), true}, {portFrom("udp 1999 [fd00::6]:80"), true},
		{portFrom("udp 999 10.1.0.6:80"), false}, {portFrom("udp 2000 10.1.0.6:80"), false}, {portFrom("tcp 1500 10.1.0.6:80"), false},
		{portFrom("udp 192.0.2.1:1500 10.1.0.6:80"), false},
		{long(1999, 2100, "10.1.0.6"), true}, {long(900, 1000, "10.1.0.6"), true}, {long(1200, 1300, "10.1.0.6"), true},
		{long(500, 3000, "10.1.0.6"), true},
		{long(2001, 2100, "10.1.0.6"), false},
	} {
		err := addPorts(h, ownerB, "kt0", []ports.Port{c.port})
		if isTaken(err) != c.clash || !c.clash && err != nil {
			t.Errorf("%s: %v", c.port, err)
		}
		kerneltest.Must(t, checkPorts(h, ownerA, a), delPorts(h, ownerB, []ports.Port{c.port}))
	}
	kerneltest.Must(t, addPorts(h, ownerB, "", portList("udp 3050 10.1.0.6:80")))
	if err := addPorts(h, ownerA, "", []ports.Port{long(3000, 3100, "10.1.0.5")}); !isTaken(err) ||
		!strings.Contains(err.Error(), "udp 3050 is in use by shop/web-1") {
		t.Errorf("range over a port: %v", err)
	}
	kerneltest.Must(t, delPorts(h, ownerB, portList("udp 3050 10.1.0.6:80")), delPorts(h, ownerA, a))
	if left := portElements(t); len(left) > 0 {
		t.Errorf("left %q", left)
	}
}

// Ports of the iptables and nftables backends conflict in both directions.
func TestTaken(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	add := func(owner string, taken bool, texts ...string) error {
		return addAll(h, ownedPorts{Owner: owner, ByIPTables: taken, Ports: portList(texts...)})
	}
	kerneltest.Must(t, add(ownerA, true, "tcp 80 10.1.0.5:80", "tcp 192.0.2.1:81 10.1.0.5:80"),
		add(ownerB, false, "tcp 90 10.1.0.6:80", "tcp 192.0.2.1:91 10.1.0.6:80"))
	for text, taken := range map[string]bool{"tcp 80 10.1.0.6:80": false, "tcp 192.0.2.1:81 10.1.0.6:80": false, "tcp 90 10.1.0.5:1": true,
		"tcp 192.0.2.1:91 10.1.0.5:1": true} {
		owner := map[bool]string{true: ownerA, false: ownerB}[taken]
		if err := add(owner, taken, text); !isTaken(err) {
			t.Errorf("%s: %v", text, err)
		}
	}
	// A port with a hostIP does not conflict with the same port without one. With two backends, connections to the hostIP go to the one whose
	// rules run first.
	one := "tcp 192.0.2.9:80 10.1.0.6:80"
	kerneltest.Must(t, add(ownerB, false, one))
	if err := checkPorts(h, ownerB, portList(one)); !isDifferent(err) || !strings.Contains(err.Error(), "has it too") {
		t.Errorf("got %v", err)
	}
	kerneltest.Must(t, delPorts(h, ownerB, portList(one)))
	kerneltest.Must(t, delHostPorts(h, ownedPorts{Owner: ownerA, ByIPTables: true,
		Ports: portList("tcp 80 10.1.0.5:80", "tcp 192.0.2.1:81 10.1.0.5:80")}),
		add(ownerB, false, "tcp 80 10.1.0.6:80"))
}

// delOwnedHostPorts deletes all ports of the attachment without knowing them, and no others.
func TestDelOwned(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	a := append(portList("tcp 80 10.1.0.5:80", "udp 192.0.2.1:81 10.1.0.5:80", "tcp 80 [fd00::5]:80"),
		ports.Port{Protocol: "tcp", Port: 1000, Last: 1100, To: netip.MustParseAddrPort("10.1.0.5:1000"), SNAT: true, MasqAll: true})
	b := portList("tcp 90 10.1.0.6:80")
	kerneltest.Must(t, addPorts(h, ownerB, "", b))
	before := portElements(t)
	kerneltest.Must(t, addPorts(h, ownerA, "", a))
	hash := ownerHash(ownerA)
	if o, ok, err := findOwner(h, hash); !ok || err != nil || o != (portOwner{Hash: hash}) {
		t.Error(o, ok, err)
	}
	var gone []string
	ports, err := delOwnedHostPorts(h, hash)
	for _, p := range ports {
		gone = append(gone, p.String()+" "+p.To.Addr().String())
	}
	slices.Sort(gone)
	want := []string{"tcp 1000-1100 10.1.0.5", "tcp 80 10.1.0.5", "tcp 80 fd00::5", "udp 192.0.2.1:81 10.1.0.5"}
	if diff := cmp.Diff(want, gone); diff != "" || err != nil {
		t.Error(err, diff)
	}
	if o, ok, err := findOwner(h, hash); ok || err != nil {
		t.Error(o, err)
	}
	if diff := cmp.Diff(before, portElements(t)); diff != "" {
		t.Error(diff)
	}
}

// The elements of a large port range exceed a netlink message and a socket buffer.
func TestTableManyPorts(t *testing.T) {
	if data, err := os.ReadFile("/proc/sys/net/core/wmem_max"); err == nil {
		if limit, err := strconv.Atoi(strings.TrimSpace(string(data))); err == nil && limit < 1<<20 {
			t.Skipf("SKIPPED: a user namespace may not exceed net.core.wmem_max, which is %d here", limit)
		}
	}
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	var list []ports.Port
	for i := range 700 {
		list = append(list, ports.Port{Protocol: "tcp", Port: uint16(10000 + i),
			To: netip.AddrPortFrom(netip.MustParseAddr("10.1.0.5"), uint16(i+1)), SNAT: true})
	}
	owner := ownerA + strings.Repeat("x", 300) // comments are truncated
	for range 2 {
		kerneltest.Must(t, addPorts(h, owner, "kt0", list), checkPorts(h, owner, list))
	}
	if n := len(portElements(t)); n != 1400 {
		t.Errorf("%d elements, want 1400", n)
	}
	kerneltest.Must(t, delPorts(h, owner, list))
	if n := len(portElements(t)); n != 0 {
		t.Errorf("%d elements are left", n)
	}
}

func TestHairpinLinks(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	for _, link := range []string{"kt0", "kt0", "fifteen-bytes-x", ""} {
		kerneltest.Must(t, addPorts(h, ownerA, link, portList("tcp 8080 10.1.0.5:80")))
	}
	if lines := recordLines(t, "nft element", " hairpin "); len(lines) != 2 {
		t.Errorf("got %q", lines)
	}
}

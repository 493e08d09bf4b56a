// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"

	"github.com/podlace/podlace/pkg/plugin"
)

const (
	ownerA = "aaaaaaaaaaaaaaaa shop/web-0"
	ownerB = "bbbbbbbbbbbbbbbb shop/web-1"
)

// mapping makes a mapping from "tcp 8080 10.1.0.5:80" or "udp 192.0.2.1:53 10.1.0.5:53".
func mapping(text string) HostPort {
	words := strings.Fields(text)
	p := HostPort{Protocol: words[0], To: netip.MustParseAddrPort(words[2]), SNAT: true}
	if at, err := netip.ParseAddrPort(words[1]); err == nil {
		p.HostIP, p.Port = at.Addr(), at.Port()
		return p
	}
	if _, err := fmt.Sscan(words[1], &p.Port); err != nil {
		panic(err)
	}
	return p
}

func portList(texts ...string) (out []HostPort) {
	for _, text := range texts {
		out = append(out, mapping(text))
	}
	return out
}

// flush empties the whole of nftables now and at the end of the test, as an admin's "nft flush ruleset" does.
func flush(t testing.TB) {
	t.Helper()
	now := func() {
		c, err := nftables.New()
		if err != nil {
			t.Fatal(err)
		}
		c.FlushRuleset()
		mustDo(t, c.Flush())
	}
	now()
	t.Cleanup(now)
}

// portElements lists the elements of all port sets, without the skeleton.
func portElements(t *testing.T) (lines []string) {
	t.Helper()
	for _, line := range records(t, "nft element inet "+hostportTable) {
		if !strings.Contains(line, " hairpin ") && !strings.Contains(line, " "+schemaSet+" ") {
			lines = append(lines, line)
		}
	}
	return lines
}

func TestKeys(t *testing.T) {
	for text, want := range map[string]string{
		"tcp 8080 10.1.0.5:80":               "ports4 06000000 1f900000 = 0a010005 00500000; snat4 0a010005 06000000 1f900000",
		"udp 192.0.2.1:53 10.1.0.5:5353":     "hostip_ports4 c0000201 11000000 00350000 = 0a010005 14e90000; snat4 0a010005 11000000 00350000",
		"sctp 1 [fd00::5]:65535":             "ports6 84000000 00010000 = fd000000000000000000000000000005 ffff0000; snat6 fd000000000000000000000000000005 84000000 00010000",
		"tcp [2001:db8::1]:443 [fd00::5]:80": "hostip_ports6 20010db8000000000000000000000001 06000000 01bb0000 = fd000000000000000000000000000005 00500000; snat6 fd000000000000000000000000000005 06000000 01bb0000",
	} {
		var parts []string
		for _, e := range mapping(text).elements("x") {
			part := fmt.Sprintf("%s %x", e.Set, e.Key)
			if e.Value != nil {
				part += fmt.Sprintf("=%x", e.Value)
			}
			parts = append(parts, part)
		}
		if got := strings.Join(parts, ";"); squeeze(got) != squeeze(want) {
			t.Errorf("%s:\n got %s\nwant %s", text, got, want)
		}
	}
	all := mapping("tcp 80 10.1.0.5:80")
	all.MasqAll = true
	if list := all.elements("x"); len(list) != 3 || list[2].Set != "masqall4" {
		t.Errorf("got %+v", list)
	}
	all.SNAT, all.MasqAll = false, false
	if list := all.elements("x"); len(list) != 1 {
		t.Errorf("without SNAT: %+v", list)
	}
}

func squeeze(s string) string { return strings.ReplaceAll(s, " ", "") }

func TestHostPortText(t *testing.T) {
	for text, want := range map[string]string{
		"tcp 8080 10.1.0.5:80": "tcp 8080", "udp 192.0.2.1:53 10.1.0.5:53": "udp 192.0.2.1:53", "sctp [2001:db8::1]:1 [fd00::5]:1": "sctp [2001:db8::1]:1",
	} {
		if got := mapping(text).String(); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	for _, e := range mapping("udp 192.0.2.1:53 10.1.0.5:5353").elements("x") {
		if got := keyText(e); got != "udp 53" {
			t.Errorf("%s: %s", e.Set, got)
		}
	}
}

func TestHostPorts(t *testing.T) {
	flush(t)
	h := host(t)
	a := portList("tcp 8080 10.1.0.5:80", "udp 8080 10.1.0.5:80", "tcp 8080 [fd00::5]:80", "tcp 192.0.2.1:8081 10.1.0.5:81", "sctp 9 10.1.0.5:9")
	b := portList("tcp 8082 10.1.0.6:80", "tcp 192.0.2.2:8081 10.1.0.6:81", "udp 8081 10.1.0.6:81")
	empty := func() { // as before: the skeleton alone
		t.Helper()
		if left := portElements(t); len(left) > 0 {
			t.Errorf("left %q", left)
		}
	}
	if err := h.CheckHostPorts(ownerA, a); plugin.Code(err) != plugin.CodeStateDiffers {
		t.Errorf("before ADD: %v", err)
	}
	mustDo(t, h.DelHostPorts(ownerA, a)) // there is no table yet
	mustDo(t, h.AddHostPorts(ownerA, "kt0", a), h.AddHostPorts(ownerB, "kt0", b))
	mustDo(t, h.CheckHostPorts(ownerA, a), h.CheckHostPorts(ownerB, b))
	if err := h.CheckHostPorts(ownerB, a); plugin.Code(err) != plugin.CodeStateDiffers || !strings.Contains(err.Error(), "belongs to shop/web-0 now") {
		t.Errorf("as another: %v", err)
	}
	mustDo(t, h.DelHostPorts(ownerB, a), h.CheckHostPorts(ownerA, a)) // deletes only what is the owner's
	mustDo(t, h.DelHostPorts(ownerA, a), h.CheckHostPorts(ownerB, b))
	mustDo(t, h.DelHostPorts(ownerB, b))
	empty()
	mustDo(t, h.DelHostPorts(ownerB, b), h.DelHostPorts(ownerB, nil))
	empty()
}

func TestCheckHostPorts(t *testing.T) {
	flush(t)
	h := host(t)
	mustDo(t, h.AddHostPorts(ownerA, "kt0", portList("tcp 8080 10.1.0.5:80")))
	elsewhere, noSNAT := mapping("tcp 8080 10.1.0.5:81"), mapping("tcp 8080 10.1.0.5:80")
	noSNAT.SNAT = false
	mustDo(t, h.CheckHostPorts(ownerA, []HostPort{noSNAT}))
	if err := h.CheckHostPorts(ownerA, []HostPort{elsewhere}); plugin.Code(err) != plugin.CodeStateDiffers || !strings.Contains(err.Error(), "leads elsewhere") {
		t.Errorf("got %v", err)
	}
	mustDo(t, h.DelHostPorts(ownerA, []HostPort{noSNAT}))
	mustDo(t, h.AddHostPorts(ownerA, "kt0", []HostPort{noSNAT}))
	masqAll := noSNAT
	masqAll.SNAT, masqAll.MasqAll = true, true
	if err := h.CheckHostPorts(ownerA, []HostPort{masqAll}); plugin.Code(err) != plugin.CodeStateDiffers || !strings.Contains(err.Error(), "masqall4") {
		t.Errorf("got %v", err)
	}
}

// TestHostPortClash: the first owner keeps its port, and the second gets none of its own.
func TestHostPortClash(t *testing.T) {
	flush(t)
	h := host(t)
	mustDo(t, h.AddHostPorts(ownerA, "kt0", portList("tcp 8080 10.1.0.5:80", "udp 192.0.2.1:53 10.1.0.5:53", "tcp 443 [fd00::5]:443")))
	before := portElements(t)
	for text, says := range map[string]string{
		"tcp 8080 10.1.0.6:80":         "hostPort tcp 8080 is in use by shop/web-0",
		"tcp 8080 10.1.0.5:80":         "hostPort tcp 8080 is in use by shop/web-0",
		"udp 192.0.2.1:53 10.1.0.6:53": "hostPort udp 53 is in use by shop/web-0",
		"tcp 443 [fd00::6]:443":        "hostPort tcp 443 is in use by shop/web-0",
	} {
		err := h.AddHostPorts(ownerB, "kt0", portList("tcp 9090 10.1.0.6:80", text))
		if plugin.Code(err) != plugin.CodePortConflict || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", text, err)
		}
	}
	if diff := cmp.Diff(before, portElements(t)); diff != "" {
		t.Errorf("what changed:\n%s", diff)
	}
	// Other protocols, addresses and families are no clash.
	mustDo(t, h.AddHostPorts(ownerB, "kt0", portList("udp 8080 10.1.0.6:80", "udp 192.0.2.2:53 10.1.0.6:53", "tcp 443 10.1.0.6:443", "tcp 8080 [fd00::6]:80")))
}

// TestReplaceOwn: the ports of one attachment converge, whatever was there of it.
func TestReplaceOwn(t *testing.T) {
	flush(t)
	h := host(t)
	mustDo(t, h.AddHostPorts(ownerA, "kt0", portList("tcp 8080 10.1.0.5:80", "tcp 8081 10.1.0.5:81")))
	next := portList("tcp 8080 10.1.0.9:80", "tcp 8082 10.1.0.9:82")
	renamed := strings.Fields(ownerA)[0] + " shop/renamed"
	for range 2 {
		mustDo(t, h.AddHostPorts(renamed, "kt0", next), h.CheckHostPorts(renamed, next))
	}
	if lines := records(t, "nft element", " ports4 ", "1f90"); len(lines) != 1 || !strings.Contains(lines[0], "0a010009") {
		t.Errorf("got %q", lines)
	}
}

// TestAfterFlush: whoever flushes the ruleset takes the skeleton away as well; the next pod makes all of it again.
func TestAfterFlush(t *testing.T) {
	flush(t)
	h := host(t)
	ports := portList("tcp 8080 10.1.0.5:80", "tcp 8080 [fd00::5]:80")
	skeletonLines := func() []string {
		return append(records(t, "nft chain inet "+hostportTable), append(records(t, "nft rule inet "+hostportTable), records(t, "nft set inet "+hostportTable)...)...)
	}
	mustDo(t, h.AddHostPorts(ownerA, "kt0", ports))
	whole := skeletonLines()
	if len(whole) < 20 {
		t.Errorf("the skeleton has %d lines", len(whole))
	}
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	c.FlushRuleset()
	mustDo(t, c.Flush())
	mustDo(t, h.DelHostPorts(ownerA, ports))
	if err := h.CheckHostPorts(ownerA, ports); plugin.Code(err) != plugin.CodeStateDiffers {
		t.Errorf("got %v", err)
	}
	mustDo(t, h.AddHostPorts(ownerA, "kt0", ports), h.CheckHostPorts(ownerA, ports))
	if diff := cmp.Diff(whole, skeletonLines()); diff != "" {
		t.Errorf("the skeleton differs:\n%s", diff)
	}
}

// TestSkeletonTwice: two first pods that start at once make one skeleton.
func TestSkeletonTwice(t *testing.T) {
	flush(t)
	for range 3 {
		mustDo(t, skeleton("test", buildHostports))
	}
	if lines := records(t, "nft rule inet "+hostportTable+" prerouting"); len(lines) != 1 {
		t.Errorf("got %d rules: %q", len(lines), lines)
	}
}

// TestSchema: rules of another version are written anew, and the ports that are there stay.
func TestSchema(t *testing.T) {
	flush(t)
	h := host(t)
	a := portList("tcp 8080 10.1.0.5:80")
	mustDo(t, h.AddHostPorts(ownerA, "kt0", a))
	rules := records(t, "nft rule inet "+hostportTable)
	n, err := openNFT(hostportTable)
	mustDo(t, err)
	defer n.close()
	mark := []element{{Set: schemaSet, Key: be16(schema)}}
	c, err := nftables.New()
	mustDo(t, err)
	c.FlushChain(&nftables.Chain{Table: &nftables.Table{Name: hostportTable, Family: nftables.TableFamilyINet}, Name: "prerouting"})
	mustDo(t, c.Flush(), n.delete(mark), n.add([]element{{Set: schemaSet, Key: be16(schema + 1)}}))
	mustDo(t, h.AddHostPorts(ownerB, "kt0", portList("tcp 8081 10.1.0.6:80")), h.CheckHostPorts(ownerA, a))
	if diff := cmp.Diff(rules, records(t, "nft rule inet "+hostportTable)); diff != "" {
		t.Error(diff)
	}
	if lines := records(t, "nft element inet "+hostportTable+" "+schemaSet+" "); len(lines) != 1 {
		t.Errorf("marks %q", lines)
	}
}

// TestProtectLoopback makes the table without any port.
func TestProtectLoopback(t *testing.T) {
	flush(t)
	h := host(t)
	for range 2 {
		mustDo(t, h.ProtectLoopback())
		if lines := records(t, "nft rule inet "+hostportTable+" protect_loopback", "immediate"); len(lines) != 2 {
			t.Errorf("got %q", lines)
		}
	}
}

// TestManyPorts: a published range of ports exceeds what one message and one socket buffer hold.
func TestManyPorts(t *testing.T) {
	flush(t)
	h := host(t)
	var ports []HostPort
	for i := range 700 {
		ports = append(ports, HostPort{Protocol: "tcp", Port: uint16(10000 + i), To: netip.AddrPortFrom(netip.MustParseAddr("10.1.0.5"), uint16(i+1)), SNAT: true})
	}
	owner := ownerA + strings.Repeat("x", 300) // comments are cut
	for range 2 {
		mustDo(t, h.AddHostPorts(owner, "kt0", ports), h.CheckHostPorts(owner, ports))
	}
	if n := len(portElements(t)); n != 1400 {
		t.Errorf("%d elements, want 1400", n)
	}
	mustDo(t, h.DelHostPorts(owner, ports))
	if n := len(portElements(t)); n != 0 {
		t.Errorf("%d elements are left", n)
	}
}

func TestHairpinLinks(t *testing.T) {
	flush(t)
	h := host(t)
	for _, link := range []string{"kt0", "kt0", "fifteen-bytes-x", ""} {
		mustDo(t, h.AddHostPorts(ownerA, link, portList("tcp 8080 10.1.0.5:80")))
	}
	if lines := records(t, "nft element", " hairpin "); len(lines) != 2 {
		t.Errorf("got %q", lines)
	}
}

// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/hex"
	"flag"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
)

// intervalsOf lists the intervals in a network's set, sorted by address, each with its first address and the first one after it.
func intervalsOf(t *testing.T, kind, network string, is4 bool) string {
	t.Helper()
	var points []string
	for _, line := range kerneltest.Records(t,
		"nft element inet "+nft.MasqueradeTable+" "+MasqueradeSets{Network: network}.setName(kind, nft.FamilyOf(is4).Digit)+" ") {
		_, key, _ := strings.Cut(line, "{1:")
		key, _, _ = strings.Cut(key, "}")
		mark := "~"
		if strings.Contains(line, "flags 1") {
			mark = "!"
		}
		points = append(points, key+mark)
	}
	slices.Sort(points) // sorts the end of an interval before the start of the next
	var b strings.Builder
	for _, p := range points {
		raw, err := hex.DecodeString(p[:len(p)-1])
		a, ok := netip.AddrFromSlice(raw)
		if err != nil || !ok {
			t.Fatalf("element %s: %v", p, err)
		}
		if strings.HasSuffix(p, "~") {
			fmt.Fprintf(&b, " %s-", a)
		} else {
			b.WriteString(a.String())
		}
	}
	return strings.TrimSpace(b.String())
}

func prefixes(list ...string) (out []netip.Prefix) {
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// emptyNode returns a node without nftables rules, before and after the test.
func emptyNode(t *testing.T) *kernel.Node {
	t.Helper()
	kerneltest.EmptyNFT(t)
	return lab{kerneltest.Lab{T: t}}.host()
}

var update = flag.Bool("update", false, "rewrite the golden files")

// TestRules compares the chains and rules in the kernel with golden files, which -update rewrites.
func TestRules(t *testing.T) {
	emptyNode(t)
	kerneltest.Must(t, SetMasquerade(subnets("10.1.0.0/24", "fd00:1::/64")))
	kerneltest.Golden(t, nft.MasqueradeTable, *update)
}

func masquerade(network string, sources, local []string) MasqueradeSets {
	return MasqueradeSets{Network: network, Sources: prefixes(sources...), Local: prefixes(local...)}
}

func subnets(list ...string) MasqueradeSets { return masquerade("net", list, list) }

// ensure sets up masquerade as for each new pod. The last of all has the prefixes of the newest one.
func ensure(t *testing.T, h *kernel.Node, all ...MasqueradeSets) {
	t.Helper()
	m := all[len(all)-1]
	missing, err := missingMasquerade(h, m)
	kerneltest.Must(t, err)
	if compareMasquerade(h, MasqueradeSets{Network: m.Network, Local: multicast()}) == nil {
		if err := addMasquerade(h, missing); !isExist(err) {
			kerneltest.Must(t, err)
			return
		}
	}
	sum := MasqueradeSets{Network: m.Network}
	for _, a := range all {
		sum.Sources, sum.Local = append(sum.Sources, a.Sources...), append(sum.Local, a.Local...)
	}
	kerneltest.Must(t, SetMasquerade(sum))
}

func mustCover(t *testing.T, h *kernel.Node, m MasqueradeSets) {
	t.Helper()
	if missing, err := missingMasquerade(h, m); !missing.empty() || err != nil {
		t.Errorf("missing %v, %v", missing, err)
	}
}

func TestMasquerade(t *testing.T) {
	h := emptyNode(t)
	m := subnets("10.1.0.0/24", "fd00:1::/64")
	if missing, err := missingMasquerade(h, m); len(missing.Sources) != 2 || err != nil {
		t.Errorf("before: %v, %v", missing, err)
	}
	kerneltest.Must(t, delMasquerade(h, m), deleteMasquerade(m)) // the table does not exist yet
	ensure(t, h, m)
	mustCover(t, h, m)
	for what, c := range map[string][2]string{
		"pods4":  {intervalsOf(t, "pods", "net", true), "10.1.0.0-10.1.1.0"},
		"local4": {intervalsOf(t, "local", "net", true), "10.1.0.0-10.1.1.0 224.0.0.0-240.0.0.0"},
		"pods6":  {intervalsOf(t, "pods", "net", false), "fd00:1::-fd00:1:0:1::"},
		"local6": {intervalsOf(t, "local", "net", false), "fd00:1::-fd00:1:0:1:: ff00::-"},
	} {
		if c[0] != c[1] {
			t.Errorf("%s: %s, want %s", what, c[0], c[1])
		}
	}
	before := kerneltest.Records(t, "nft ")
	ensure(t, h, m)
	if diff := cmp.Diff(before, kerneltest.Records(t, "nft ")); diff != "" {
		t.Errorf("a second pod changed:\n%s", diff)
	}
	kerneltest.Must(t, deleteMasquerade(m))
	if lines := kerneltest.Records(t, "nft ", m.name()); len(lines) > 0 {
		t.Errorf("left %q", lines)
	}
}

// TestMasqueradeChanged: masquerade follows subnets that are added or change their size.
func TestMasqueradeChanged(t *testing.T) {
	for _, c := range []struct {
		steps       []MasqueradeSets
		pods, local string
	}{
		{[]MasqueradeSets{subnets("10.1.0.0/24"), subnets("10.2.0.0/24")}, "10.1.0.0-10.1.1.0 10.2.0.0-10.2.1.0",
			"10.1.0.0-10.1.1.0 10.2.0.0-10.2.1.0"},
		{[]MasqueradeSets{subnets("10.1.0.0/24"), subnets("10.1.1.0/24")}, "10.1.0.0-10.1.1.0 10.1.1.0-10.1.2.0",
			"10.1.0.0-10.1.1.0 10.1.1.0-10.1.2.0"},
		{[]MasqueradeSets{subnets("10.1.0.0/24"), subnets("10.1.0.0/16")}, "10.1.0.0-10.2.0.0", "10.1.0.0-10.2.0.0"},
		{[]MasqueradeSets{subnets("10.1.5.0/24"), subnets("10.1.0.0/16")}, "10.1.0.0-10.2.0.0", "10.1.0.0-10.2.0.0"},
		{[]MasqueradeSets{subnets("10.1.255.0/24"), subnets("10.1.0.0/16")}, "10.1.0.0-10.2.0.0", "10.1.0.0-10.2.0.0"},
		{[]MasqueradeSets{subnets("10.1.0.0/16"), subnets("10.1.0.0/24")}, "10.1.0.0-10.2.0.0", "10.1.0.0-10.2.0.0"},
		{[]MasqueradeSets{subnets("10.1.0.0/16"), subnets("10.1.7.0/24")}, "10.1.0.0-10.2.0.0", "10.1.0.0-10.2.0.0"},
		// the network's other subnets stay masqueraded
		{[]MasqueradeSets{subnets("10.0.0.0/24"), subnets("10.2.0.0/24"), subnets("10.1.0.0/24"), subnets("10.1.0.0/16")},
			"10.0.0.0-10.0.1.0 10.1.0.0-10.2.0.0 10.2.0.0-10.2.1.0", "10.0.0.0-10.0.1.0 10.1.0.0-10.2.0.0 10.2.0.0-10.2.1.0"},
		{[]MasqueradeSets{subnets("10.1.0.0/25"), subnets("10.1.0.128/25"), subnets("10.1.0.0/24")}, "10.1.0.0-10.1.1.0", "10.1.0.0-10.1.1.0"},
	} {
		h := emptyNode(t)
		for i, m := range c.steps {
			ensure(t, h, c.steps[:i+1]...)
			mustCover(t, h, m)
		}
		if pods, local := intervalsOf(t, "pods", "net", true), intervalsOf(t, "local", "net", true); pods != c.pods ||
			local != c.local+" 224.0.0.0-240.0.0.0" {
			t.Errorf("%v:\npods  %s, want %s\nlocal %s, want %s", c.steps, pods, c.pods, local, c.local)
		}
	}
}

// TestMasqueradeAddresses: with an external IPAM plugin, whose subnets are not reliable, each pod has its own element in the set.
func TestMasqueradeAddresses(t *testing.T) {
	h := emptyNode(t)
	pod := func(address, subnet string) MasqueradeSets {
		return masquerade("net", []string{address + "/32"}, []string{subnet})
	}
	a, b, c, wider := pod("10.9.0.2", "10.9.0.0/24"), pod("10.9.0.3", "10.9.0.0/24"), pod("10.9.0.255", "10.9.0.0/24"),
		pod("10.9.3.2", "10.9.0.0/16")
	for _, m := range []MasqueradeSets{a, b, c, a} {
		ensure(t, h, m)
	}
	mustCover(t, h, a)
	mustCover(t, h, b)
	if missing, _ := missingMasquerade(h, pod("10.9.0.4", "10.9.0.0/24")); len(missing.Sources) != 1 {
		t.Error("the address behind two others counts as masqueraded")
	}
	ensure(t, h, a, b, c, wider) // the subnet grew: existing elements stay
	for _, m := range []MasqueradeSets{a, b, c, wider} {
		mustCover(t, h, m)
	}
	for range 2 {
		kerneltest.Must(t, delMasquerade(h, b), delMasquerade(h, MasqueradeSets{Network: "net"}))
	}
	if got, want := intervalsOf(t, "pods", "net", true), "10.9.0.2-10.9.0.3 10.9.0.255-10.9.1.0 10.9.3.2-10.9.3.3"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got, want := intervalsOf(t, "local", "net", true), "10.9.0.0-10.10.0.0 224.0.0.0-240.0.0.0"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// TestMasqueradeNetworks: networks do not affect each other, even with the same subnets.
func TestMasqueradeNetworks(t *testing.T) {
	h := emptyNode(t)
	one, two := subnets("10.1.0.0/24"), subnets("10.1.0.0/24")
	two.Network = strings.Repeat("long-name.", 25)
	ensure(t, h, one)
	ensure(t, h, two)
	kerneltest.Must(t, deleteMasquerade(one))
	mustCover(t, h, two)
	if missing, err := missingMasquerade(h, one); len(missing.Sources) != 1 || err != nil {
		t.Errorf("%v, %v", missing, err)
	}
	kerneltest.Must(t, deleteMasquerade(one)) // the network has no objects yet
	mustCover(t, h, two)
}

func TestDistinct(t *testing.T) {
	for in, want := range map[string]string{
		"":                        "",
		"10.1.0.0/24 10.1.0.0/24": "10.1.0.0/24",
		"10.1.5.0/24 10.1.0.0/16 10.2.0.0/24 10.0.0.0/8": "10.0.0.0/8",
		"10.1.0.0/24 10.1.1.0/24 fd00::/64 fd00::/48":    "10.1.0.0/24 10.1.1.0/24 fd00::/48",
		"0.0.0.0/0 fd00::/64":                            "0.0.0.0/0 fd00::/64",
	} {
		if got := fmt.Sprint(distinct(prefixes(strings.Fields(in)...))); got != "["+want+"]" {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

// TestMasqueradeAfterFlush: the next pod's ADD restores the masquerade of the whole network after a flush.
func TestMasqueradeAfterFlush(t *testing.T) {
	h := emptyNode(t)
	m := subnets("10.1.0.0/24")
	ensure(t, h, m)
	before := kerneltest.Records(t, "nft ")
	kerneltest.Must(t, kerneltest.FlushNFT())
	ensure(t, h, m)
	if diff := cmp.Diff(before, kerneltest.Records(t, "nft ")); diff != "" || len(before) < 10 {
		t.Errorf("%d lines before:\n%s", len(before), diff)
	}
}

func TestAfter(t *testing.T) {
	for s, want := range map[string]string{
		"10.1.0.0/24": "10.1.1.0", "10.1.255.0/24": "10.2.0.0", "10.1.2.3/32": "10.1.2.4", "10.1.2.255/32": "10.1.3.0", "0.0.0.0/1": "128.0.0.0",
		"255.255.255.0/24": "invalid IP", "0.0.0.0/0": "invalid IP", "255.255.255.255/32": "invalid IP", "224.0.0.0/4": "240.0.0.0",
		"10.1.2.3/8": "11.0.0.0",
		"fd00::/64":  "fd00:0:0:1::", "fd00:0:0:ffff::/64": "fd00:0:1::", "ff00::/8": "invalid IP", "::/0": "invalid IP", "::1/128": "::2",
	} {
		if got := addressAfter(netip.MustParsePrefix(s)); got.String() != want {
			t.Errorf("%s: %s, want %s", s, got, want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/plugin"
)

func TestParseRange(t *testing.T) {
	for _, c := range []struct {
		raw        rawRange
		start, end string
		gateway    string
	}{
		{rawRange{Subnet: "192.0.2.0/24"}, "192.0.2.1", "192.0.2.254", "192.0.2.1"},
		{rawRange{Subnet: "192.0.2.0/25"}, "192.0.2.1", "192.0.2.126", "192.0.2.1"},
		{rawRange{Subnet: "192.0.2.0/30"}, "192.0.2.1", "192.0.2.2", "192.0.2.1"},
		{rawRange{Subnet: "10.0.0.0/8"}, "10.0.0.1", "10.255.255.254", "10.0.0.1"},
		{rawRange{Subnet: "2001:db8:1::/64"}, "2001:db8:1::1", "2001:db8:1::ffff:ffff:ffff:ffff", "2001:db8:1::1"},
		{rawRange{Subnet: "2001:db8::/126"}, "2001:db8::1", "2001:db8::3", "2001:db8::1"},
		{rawRange{Subnet: "192.0.2.0/24", RangeStart: "192.0.2.40", RangeEnd: "192.0.2.50", Gateway: "192.0.2.254"}, "192.0.2.40", "192.0.2.50",
			"192.0.2.254"},
		{rawRange{Subnet: "192.0.2.0/24", RangeStart: "192.0.2.0", RangeEnd: "192.0.2.255"}, "192.0.2.0", "192.0.2.255", "192.0.2.1"},
		{rawRange{Subnet: "192.0.2.0/24", RangeStart: "192.0.2.7", RangeEnd: "192.0.2.7"}, "192.0.2.7", "192.0.2.7", "192.0.2.1"},
		{rawRange{Subnet: "192.0.2.0/24", RangeStart: "::ffff:192.0.2.5", Gateway: "::ffff:192.0.2.9"}, "192.0.2.5", "192.0.2.254", "192.0.2.9"},
		{rawRange{Subnet: "192.0.2.0/24", Gateway: "198.51.100.1"}, "192.0.2.1", "192.0.2.254", "198.51.100.1"},
		{rawRange{Subnet: "192.0.2.4/31"}, "192.0.2.4", "192.0.2.5", ""},
		{rawRange{Subnet: "192.0.2.4/31", Gateway: "192.0.2.4"}, "192.0.2.4", "192.0.2.5", "192.0.2.4"},
		{rawRange{Subnet: "192.0.2.255/32"}, "192.0.2.255", "192.0.2.255", ""},
		{rawRange{Subnet: "255.255.255.254/31"}, "255.255.255.254", "255.255.255.255", ""},
		{rawRange{Subnet: "2001:db8::6/127"}, "2001:db8::6", "2001:db8::7", ""},
		{rawRange{Subnet: "2001:db8::9/128", Gateway: "fe80::1"}, "2001:db8::9", "2001:db8::9", "fe80::1"},
	} {
		got, err := parseRange(c.raw)
		if err != nil {
			t.Errorf("%+v: %v", c.raw, err)
			continue
		}
		want := Range{Subnet: netip.MustParsePrefix(c.raw.Subnet), Start: netip.MustParseAddr(c.start), End: netip.MustParseAddr(c.end)}
		if c.gateway != "" {
			want.Gateway = netip.MustParseAddr(c.gateway)
		}
		if got != want {
			t.Errorf("%+v: got %+v, want %+v", c.raw, got, want)
		}
	}
}

func TestParseRangeRefused(t *testing.T) {
	const subnet = "192.0.2.0/24"
	for _, c := range []struct {
		raw  rawRange
		says string
	}{
		{rawRange{}, `subnet ""`},
		{rawRange{Subnet: "192.0.2.0"}, "want an address and prefix length"},
		{rawRange{Subnet: "192.0.2.0/33"}, "want an address and prefix length"},
		{rawRange{Subnet: "fe80::%eth0/64"}, "want an address and prefix length"},
		{rawRange{Subnet: "192.0.2.1/24"}, "has host bits set, want 192.0.2.0/24"},
		{rawRange{Subnet: "192.0.2.128/23"}, "has host bits set, want 192.0.2.0/23"},
		{rawRange{Subnet: "2001:db8::1/64"}, "has host bits set, want 2001:db8::/64"},
		{rawRange{Subnet: "::ffff:192.0.2.0/120"}, "IPv4-mapped"},
		{rawRange{Subnet: "192.0.2.1/31"}, "has host bits set, want 192.0.2.0/31"},
		{rawRange{Subnet: "192.0.2.0/31", RangeStart: "192.0.2.2"}, "not in subnet"},
		{rawRange{Subnet: subnet, RangeStart: "x"}, `rangeStart "x": want an IP address`},
		{rawRange{Subnet: subnet, RangeStart: "192.0.3.5"}, "rangeStart 192.0.3.5: not in subnet"},
		{rawRange{Subnet: subnet, RangeStart: "2001:db8::5"}, "want an address of the family of subnet 192.0.2.0/24"},
		{rawRange{Subnet: subnet, RangeEnd: "192.0.1.255"}, "rangeEnd 192.0.1.255: not in subnet"},
		{rawRange{Subnet: subnet, RangeEnd: "192.0.2.5/24"}, "want an IP address"},
		{rawRange{Subnet: subnet, RangeStart: "192.0.2.50", RangeEnd: "192.0.2.40"}, "rangeStart 192.0.2.50 is after rangeEnd 192.0.2.40"},
		{rawRange{Subnet: subnet, Gateway: "nonsense"}, `gateway "nonsense": want an IP address`},
		{rawRange{Subnet: subnet, Gateway: "2001:db8::1"}, "gateway 2001:db8::1: want an address of the family of subnet 192.0.2.0/24"},
		{rawRange{Subnet: "fe80::/64", Gateway: "fe80::1%eth0"}, "want an IP address"},
		{rawRange{Subnet: "0.0.0.0/0"}, "subnet 0.0.0.0/0: has no addresses for pods"},
		{rawRange{Subnet: subnet, Gateway: "127.0.0.1"}, "gateway 127.0.0.1: a loopback address"},
		{rawRange{Subnet: subnet, Gateway: "224.0.0.1"}, "gateway 224.0.0.1: a multicast address"},
		{rawRange{Subnet: subnet, Gateway: "255.255.255.255"}, "gateway 255.255.255.255: a broadcast address"},
		{rawRange{Subnet: subnet, Gateway: "192.0.2.255"}, "gateway 192.0.2.255: a broadcast address"},
		{rawRange{Subnet: subnet, Gateway: "0.0.0.0"}, "gateway 0.0.0.0: the unspecified address"},
		{rawRange{Subnet: "2001:db8::/64", Gateway: "::"}, "gateway ::: the unspecified address"},
		{rawRange{Subnet: "2001:db8::/64", Gateway: "::1"}, "gateway ::1: a loopback address"},
		{rawRange{Subnet: "2001:db8::/64", Gateway: "ff02::1"}, "gateway ff02::1: a multicast address"},
	} {
		got, err := parseRange(c.raw)
		if plugin.Code(err) != plugin.CodeConfig || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %+v, %v: want %q", c.raw, got, err, c.says)
		}
	}
}

// rangeIn returns a range in a subnet, whose first address is the gateway.
func rangeIn(t testing.TB, subnet, start, end string) Range {
	t.Helper()
	r, err := parseRange(rawRange{Subnet: subnet, RangeStart: start, RangeEnd: end})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestContains(t *testing.T) {
	r4, r6 := rangeIn(t, "192.0.2.0/24", "192.0.2.40", "192.0.2.50"), rangeIn(t, "2001:db8::/64", "2001:db8::40", "2001:db8::50")
	for s, want := range map[string][2]bool{
		"192.0.2.39": {}, "192.0.2.40": {true}, "192.0.2.50": {true}, "192.0.2.51": {}, "192.0.3.45": {}, "::ffff:192.0.2.45": {},
		"2001:db8::3f": {}, "2001:db8::40": {false, true}, "2001:db8::50": {false, true}, "2001:db8::51": {}, "2001:db8:0:1::45": {},
	} {
		addr := netip.MustParseAddr(s)
		if got := [2]bool{r4.Contains(addr), r6.Contains(addr)}; got != want {
			t.Errorf("%s: %v, want %v", s, got, want)
		}
	}
	if r4.Contains(netip.Addr{}) {
		t.Error("contains the invalid address")
	}
}

func TestCheckSets(t *testing.T) {
	a := rangeIn(t, "192.0.2.0/24", "192.0.2.10", "192.0.2.20")
	inside, before, behind := rangeIn(t, "192.0.2.0/24", "192.0.2.12", "192.0.2.13"), rangeIn(t, "192.0.2.0/24", "192.0.2.5", "192.0.2.9"),
		rangeIn(t, "192.0.2.0/24", "192.0.2.21", "192.0.2.30")
	left, right := rangeIn(t, "192.0.2.0/24", "192.0.2.5", "192.0.2.10"), rangeIn(t, "192.0.2.0/24", "192.0.2.20", "192.0.2.30")
	six := rangeIn(t, "2001:db8::/64", "", "")
	for what, c := range map[string]struct {
		sets []RangeSet
		says string
	}{
		"disjoint in a set":        {[]RangeSet{{before, a, behind}}, ""},
		"disjoint in sets":         {[]RangeSet{{before}, {a}, {six}, {behind}}, ""},
		"same in a set":            {[]RangeSet{{a, a}}, "overlap"},
		"same in two sets":         {[]RangeSet{{a}, {a}}, "overlap"},
		"inside":                   {[]RangeSet{{a, inside}}, "192.0.2.10-192.0.2.20 and 192.0.2.12-192.0.2.13 overlap"},
		"around":                   {[]RangeSet{{inside}, {a}}, "overlap"},
		"touches the start":        {[]RangeSet{{a}, {behind, left}}, "overlap"},
		"touches the end":          {[]RangeSet{{right}, {before, a}}, "overlap"},
		"in a later set":           {[]RangeSet{{a}, {six}, {before, inside}}, "overlap"},
		"mixed":                    {[]RangeSet{{a, six}}, "ranges[0]: mixes IPv4 and IPv6"},
		"empty":                    {[]RangeSet{{a}, {}}, "ranges[1]: is empty"},
		"overlap only with itself": {[]RangeSet{{a}}, ""},
	} {
		err := checkSets(c.sets)
		if c.says == "" && err != nil || c.says != "" && (plugin.Code(err) != plugin.CodeConfig || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: %v, want %q", what, err, c.says)
		}
	}
}

// walkOrder returns the addresses that startingAfter yields, each shortened to its last group, such as ".5" or ":5".
func walkOrder(t *testing.T, s RangeSet, begin string) (order []string) {
	t.Helper()
	addr, _ := netip.ParseAddr(begin)
	for a := range s.startingAfter(addr) {
		if _, in := s.find(a); !in {
			t.Errorf("%s is not in %s", a, s)
		}
		text := a.String()
		order = append(order, text[strings.LastIndexAny(text, ".:"):])
	}
	return order
}

func TestWalk(t *testing.T) {
	small := RangeSet{rangeIn(t, "192.0.2.0/29", "", "")}
	two := RangeSet{rangeIn(t, "192.0.2.0/30", "", ""), rangeIn(t, "198.51.100.0/24", "198.51.100.10", "198.51.100.12")}
	top := RangeSet{rangeIn(t, "255.255.255.0/24", "255.255.255.253", "255.255.255.255")}
	for _, c := range []struct {
		set   RangeSet
		begin string
		want  string
	}{
		{small, "", ".2 .3 .4 .5 .6"},
		{small, "192.0.2.1", ".2 .3 .4 .5 .6"},
		{small, "192.0.2.3", ".4 .5 .6 .2 .3"},
		{small, "192.0.2.6", ".2 .3 .4 .5 .6"},
		{small, "192.0.2.7", ".2 .3 .4 .5 .6"},
		{small, "203.0.113.5", ".2 .3 .4 .5 .6"},
		{small, "2001:db8::3", ".2 .3 .4 .5 .6"},
		{RangeSet{rangeIn(t, "192.0.2.0/30", "", "")}, "", ".2"},
		{RangeSet{rangeIn(t, "2001:db8::/126", "", "")}, "2001:db8::2", ":3 :2"},
		{two, "", ".2 .10 .11 .12"},
		{two, "192.0.2.2", ".10 .11 .12 .2"},
		{two, "198.51.100.10", ".11 .12 .2 .10"},
		{two, "198.51.100.12", ".2 .10 .11 .12"},
		{top, "255.255.255.255", ".253 .254 .255"},
		{top, "255.255.255.254", ".255 .253 .254"},
		{RangeSet{rangeIn(t, "192.0.2.0/24", "192.0.2.1", "192.0.2.1")}, "", ""},
	} {
		if diff := cmp.Diff(c.want, strings.Join(walkOrder(t, c.set, c.begin), " ")); diff != "" {
			t.Errorf("%s after %q:\n%s", c.set, c.begin, diff)
		}
	}
}

func TestSize(t *testing.T) {
	for _, c := range []struct {
		set  RangeSet
		want float64
	}{
		{RangeSet{rangeIn(t, "192.0.2.0/24", "", "")}, 253},
		{RangeSet{rangeIn(t, "192.0.2.0/24", "192.0.2.10", "192.0.2.10")}, 1},
		{RangeSet{rangeIn(t, "192.0.2.0/24", "192.0.2.10", "192.0.2.19"), rangeIn(t, "198.51.100.0/30", "", "")}, 11},
		{RangeSet{rangeIn(t, "10.0.0.0/8", "", "")}, 16777213},
		{RangeSet{rangeIn(t, "2001:db8::/112", "", "")}, 65534},
		{RangeSet{rangeIn(t, "2001:db8::/64", "", "")}, 1<<64 - 2},
		{RangeSet{rangeIn(t, "2001:db8::/32", "2001:db8:1::", "2001:db8:2::")}, 1<<80 + 1},
		{RangeSet{rangeIn(t, "2001:db8::/64", "2001:db8::ff", "2001:db8::100")}, 2},
		{RangeSet{rangeIn(t, "192.0.2.0/31", "", ""), rangeIn(t, "192.0.2.5/32", "", "")}, 3},
	} {
		if got := c.set.count(); got != c.want {
			t.Errorf("%s: counted %g, want %g", c.set, got, c.want)
		}
	}
}

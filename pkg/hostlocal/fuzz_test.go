// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"io"
	"log/slog"
	"math/big"
	"net/netip"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/plugin"
)

// FuzzParse checks that, for each CNI command, Parse returns an error with a code, or valid ranges.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"", "{}", `{"ipam":{}}`, `{"ipam":{"subnet":"10.0.0.0/8"}}`,
		`{"ipam":{"ranges":[[{"subnet":"fd00::/64"}]]}}`,
		`{"ipam":{"ranges":[null]}}`, `{"ipam":{"ranges":[[null]]}}`,
		`{"ipam":{"subnet":"0.0.0.0/0","gateway":"::1","routes":[{"dst":"0.0.0.0/0","gw":"x"}]}}`,
		`{"ipam":{"subnet":"10.0.0.0/24"},"runtimeConfig":{"ips":["10.0.0.5"],"ipRanges":[[{"subnet":"10.1.0.0/24"}]]},"args":{"cni":{"ips":[""]}}}`} {
		f.Add(seed, "10.0.0.7")
		f.Add(seed, "")
	}
	f.Fuzz(func(t *testing.T, config, ip string) {
		r := &plugin.Request{Network: "net", CNIVersion: "1.1.0", Args: map[string]string{"IP": ip}, Config: []byte(config),
			Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
		if dir := parseDir(r); !strings.HasSuffix(dir, "/net") {
			t.Errorf("%q: leases in %s", config, dir)
		}
		if strings.Contains(strings.ToLower(config), "resolvconf") {
			return // would read any file that it names
		}
		c, err := Parse(r)
		if err != nil {
			if code := plugin.Code(err); code != plugin.CodeDecode && code != plugin.CodeConfig {
				t.Errorf("%q: code %d, %v", config, code, err)
			}
			return
		}
		for _, s := range c.Sets {
			s.mustBeSound(t)
		}
	})
}

func (s RangeSet) mustBeSound(t *testing.T) {
	t.Helper()
	for _, r := range s {
		if !r.Subnet.Contains(r.Start) || !r.Subnet.Contains(r.End) || r.End.Less(r.Start) || r.Start.Is4() != s.is4() {
			t.Errorf("range %+v of %s", r, s)
		}
	}
	tries := 0
	for addr := range s.startingAfter(s[len(s)-1].End) {
		if in, ok := s.find(addr); !ok || addr == in.Gateway {
			t.Errorf("walked to %s in %+v", addr, in)
		}
		if tries++; tries > 5 {
			break
		}
	}
}

func FuzzOwner(f *testing.F) {
	for _, seed := range []string{"", "id", "id\r\neth0", " id\r\n", "\r\n", "a\r\nb\r\nc", "\xff\x00"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		a := parseOwner([]byte(text))
		if a.ContainerID == "" && strings.TrimSpace(text) != "" ||
			strings.ContainsFunc(a.ContainerID+a.IfName, func(c rune) bool { return c == ' ' || !unicode.IsPrint(c) }) {
			t.Errorf("%q: %+v", text, a)
		}
		if !owns(a, a) && a.IfName != "" {
			t.Errorf("%q: %+v does not own itself", text, a)
		}
		good := !strings.ContainsFunc(text, func(c rune) bool { return c <= ' ' || c > '~' || c == '/' || c == utf8.RuneError })
		want := plugin.Attachment{ContainerID: "x" + text, IfName: "y" + text}
		if back := parseOwner([]byte(leaseContent(want))); good && len(text) < 500 && back != want {
			t.Errorf("%q was parsed as %+v", text, back)
		}
	})
}

func FuzzResolvConf(f *testing.F) {
	for _, seed := range []string{"", "nameserver", "nameserver 1.1.1.1", "#nameserver x\nsearch a b c", "options\nnameserver\t::1\r\n",
		"\x00\xff"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		dns := parseResolvConf(text)
		for _, list := range [][]string{dns.Nameservers, dns.Search, dns.Options, {dns.Domain + "x"}} {
			for _, word := range list {
				if word == "" || len(strings.Fields(word)) != 1 {
					t.Errorf("%q: the word %q", text, word)
				}
			}
		}
	})
}

// number returns an address as a big integer, so that the model needs no carry arithmetic.
func number(a netip.Addr) *big.Int { return new(big.Int).SetBytes(a.AsSlice()) }

// address returns the address, of the same family as like, with the given number.
func address(n *big.Int, like netip.Addr) (netip.Addr, bool) {
	size := like.BitLen() / 8
	if n.Sign() < 0 || n.BitLen() > size*8 {
		return netip.Addr{}, false
	}
	return netip.AddrFromSlice(n.FillBytes(make([]byte, size)))
}

func plus(n *big.Int, d int64) *big.Int { return new(big.Int).Add(n, big.NewInt(d)) }

// FuzzArithmetic compares content, order and size of ranges with a model of big integers.
func FuzzArithmetic(f *testing.F) {
	for _, base := range []string{"10.1.2.0", "10.0.255.250", "255.255.255.240", "0.0.0.0", "fd00::", "2001:db8::fffe",
		"ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff0", "::"} {
		f.Add(netip.MustParseAddr(base).AsSlice(), uint8(28), uint8(3), uint8(9), uint8(4), uint8(2))
		f.Add(netip.MustParseAddr(base).AsSlice(), uint8(120), uint8(0), uint8(255), uint8(15), uint8(0))
		f.Add(netip.MustParseAddr(base).AsSlice(), uint8(32), uint8(0), uint8(0), uint8(0), uint8(1))
		f.Add(netip.MustParseAddr(base).AsSlice(), uint8(24), uint8(14), uint8(0), uint8(15), uint8(14))
	}
	f.Fuzz(func(t *testing.T, base []byte, bits, from, length, last, gateway uint8) {
		addr, ok := netip.AddrFromSlice(base)
		if !ok || addr.Is4In6() || int(bits) > addr.BitLen() {
			return
		}
		compareWithModel(t, netip.PrefixFrom(addr, int(bits)).Masked(), int64(from), int64(length%32), int64(last), int64(gateway))
	})
}

func compareWithModel(t *testing.T, subnet netip.Prefix, from, length, begin, gateway int64) {
	first := number(subnet.Addr())
	size := new(big.Int).Lsh(big.NewInt(1), uint(subnet.Addr().BitLen()-subnet.Bits()))
	end := plus(new(big.Int).Add(first, size), -1)
	usable := end
	if subnet.Addr().Is4() && subnet.Bits() < 31 {
		usable = plus(end, -1)
	}
	if got := number(lastUsable(subnet)); got.Cmp(usable) != 0 {
		t.Fatalf("last of %s: %v, want %v", subnet, got, usable)
	}
	start, stop := plus(first, from), plus(first, from+length)
	if _, ok := address(plus(first, gateway), subnet.Addr()); !ok || stop.Cmp(end) > 0 {
		return
	}
	text := func(n *big.Int) string {
		a, _ := address(n, subnet.Addr())
		return a.String()
	}
	r, err := parseRange(rawRange{Subnet: subnet.String(), RangeStart: text(start), RangeEnd: text(stop), Gateway: text(plus(first, gateway))})
	if err != nil && !strings.Contains(err.Error(), "has no addresses for pods") && !strings.Contains(err.Error(), "no gateway can have it") {
		t.Fatalf("%s %v-%v: %v", subnet, start, stop, err)
	}
	compareOrder(t, r, start, stop, plus(first, begin), plus(first, gateway))
}

// compareOrder checks the order of addresses: from the one after begin to the last of the range, then from the first to begin, without the
// gateway.
func compareOrder(t *testing.T, r Range, start, stop, begin, gateway *big.Int) {
	inside := begin.Cmp(start) >= 0 && begin.Cmp(stop) <= 0
	beginAddr, _ := address(begin, r.Start)
	if r.Contains(beginAddr) != inside {
		t.Fatalf("%s contains %s: %t", r, beginAddr, !inside)
	}
	var want []string
	add := func(from, to *big.Int) {
		for n := from; n.Cmp(to) <= 0; n = plus(n, 1) {
			if a, ok := address(n, r.Start); ok && n.Cmp(gateway) != 0 {
				want = append(want, a.String())
			}
		}
	}
	if inside {
		add(plus(begin, 1), stop)
		add(start, begin)
	} else {
		add(start, stop)
	}
	var got []string
	for a := range (RangeSet{r}).startingAfter(beginAddr) {
		if got = append(got, a.String()); len(got) > 1000 {
			break
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("%s after %s\n%s", r, beginAddr, diff)
	}
	if size := (RangeSet{r}).count(); size != float64(len(want)) {
		t.Fatalf("size of %s: %g, want %d", r, size, len(want))
	}
}

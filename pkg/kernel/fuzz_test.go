// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/hex"
	"math/big"
	"net"
	"net/netip"
	"testing"
)

// FuzzAfter compares the address behind a prefix with one computed in big integers.
func FuzzAfter(f *testing.F) {
	for _, s := range []string{"10.1.0.0/24", "0.0.0.0/0", "255.255.255.255/32", "255.255.255.0/24", "fd00::/64", "::/0", "ffff::/16", "10.255.255.255/32", "::ffff:ffff:ffff:ffff/128"} {
		p := netip.MustParsePrefix(s)
		f.Add(p.Addr().AsSlice(), uint8(p.Bits()))
	}
	f.Fuzz(func(t *testing.T, address []byte, bits uint8) {
		addr, ok := netip.AddrFromSlice(address)
		if !ok || int(bits) > addr.BitLen() {
			return
		}
		p := netip.PrefixFrom(addr, int(bits))
		size := new(big.Int).Lsh(big.NewInt(1), uint(addr.BitLen()-int(bits)))
		want := new(big.Int).SetBytes(p.Masked().Addr().AsSlice())
		want.Add(want, size)
		got := after(p)
		if want.BitLen() > addr.BitLen() {
			if got.IsValid() {
				t.Fatalf("%s: %s, want none", p, got)
			}
			return
		}
		if new(big.Int).SetBytes(got.AsSlice()).Cmp(want) != 0 || got.BitLen() != addr.BitLen() {
			t.Fatalf("%s: %s, want %v", p, got, want)
		}
		if list := interval("x", p); len(list) != 2 || !list[1].KeyEnd || list[0].KeyEnd {
			t.Fatalf("%s: %+v", p, list)
		}
	})
}

// FuzzPrefix: what comes from a result or the kernel is a prefix or nothing.
func FuzzPrefix(f *testing.F) {
	f.Add([]byte{10, 1, 0, 5}, []byte{255, 255, 255, 0})
	f.Add([]byte{10, 1, 0, 5}, []byte{255, 0, 255, 0})
	f.Add([]byte(net.ParseIP("10.1.0.5")), []byte(net.CIDRMask(120, 128)))
	f.Add([]byte(net.ParseIP("10.1.0.5")), []byte(net.CIDRMask(24, 32)))
	f.Add([]byte(net.ParseIP("fd00::1")), []byte(net.CIDRMask(64, 128)))
	f.Add([]byte{}, []byte{})
	f.Fuzz(func(t *testing.T, ip, mask []byte) {
		p, ok := Prefix(&net.IPNet{IP: ip, Mask: mask})
		if !ok {
			return
		}
		if !p.IsValid() || p.Addr().Is4In6() {
			t.Fatalf("%v/%v: %s", ip, mask, p)
		}
		if back, ok := Prefix(IPNet(p)); !ok || back != p {
			t.Fatalf("%s came back as %s", p, back)
		}
	})
}

// FuzzParseFlow: a message of connection tracking is an entry of UDP or nothing.
func FuzzParseFlow(f *testing.F) {
	entry, _ := hex.DecodeString("020000003400018014000180080001000a00010108000200" + "0a0001021c000280050001001100000006000200040000000600030000350000" +
		"3400028014000180080001000a00010208000200" + "0a0001011c000280050001001100000006000200003500000600030004000000")
	if flow, ok := parseFlow(entry); !ok || flow.to.String() != "10.0.1.2:53" || flow.answer.String() != "10.0.1.2:53" {
		f.Errorf("%+v, %t", flow, ok)
	}
	f.Add(entry)
	f.Add(entry[:60])
	f.Add([]byte{10, 0, 0, 0, 4, 0, 1, 128})
	f.Fuzz(func(t *testing.T, message []byte) {
		if flow, ok := parseFlow(message); ok && (!flow.to.IsValid() || !flow.answer.IsValid() || flow.keptFrom(HostPort{})) {
			t.Errorf("%x: %+v", message, flow)
		}
	})
}

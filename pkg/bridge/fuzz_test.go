// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"math/big"
	"net/netip"
	"testing"
)

// FuzzAfter compares addressAfter with a computation in big integers.
func FuzzAfter(f *testing.F) {
	for _, s := range []string{"10.1.0.0/24", "0.0.0.0/0", "255.255.255.255/32", "255.255.255.0/24", "fd00::/64", "::/0", "ffff::/16",
		"10.255.255.255/32", "::ffff:ffff:ffff:ffff/128"} {
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
		got := addressAfter(p)
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

// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"net/netip"

	"github.com/google/nftables/expr"

	"github.com/podlace/podlace/pkg/nft"
)

type addressFamily struct{ nft.Family }

func familyOf(is4 bool) addressFamily { return addressFamily{nft.FamilyOf(is4)} }

// isAddress matches packets with the given address at an offset in the IP header.
func (f addressFamily) isAddress(offset uint32, a netip.Addr) []expr.Any {
	return []expr.Any{nft.Network(1, offset, f.Length), nft.Equal(a.AsSlice())}
}

// inSubnet compares the address at an offset in the IP header with a subnet.
func (f addressFamily) inSubnet(offset uint32, p netip.Prefix, op expr.CmpOp) []expr.Any {
	if p.Bits() > 0 && p.Bits()%8 == 0 { // as nft(8) writes it
		length := uint32(p.Bits() / 8)
		return []expr.Any{nft.Network(1, offset, length), &expr.Cmp{Op: op, Register: 1, Data: p.Addr().AsSlice()[:length]}}
	}
	mask, none := make([]byte, f.Length), make([]byte, f.Length)
	for bit := range p.Bits() {
		mask[bit/8] |= 1 << (7 - bit%8)
	}
	return []expr.Any{nft.Network(1, offset, f.Length),
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: f.Length, Mask: mask, Xor: none},
		&expr.Cmp{Op: op, Register: 1, Data: p.Addr().AsSlice()}}
}

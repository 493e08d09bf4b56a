// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"net/netip"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
)

// family is where the header of a family has what.
type family struct {
	proto                       byte
	source, destination, length uint32
}

func familyOf(is4 bool) family {
	if is4 {
		return family{unix.NFPROTO_IPV4, 12, 16, 4}
	}
	return family{unix.NFPROTO_IPV6, 8, 24, 16}
}

func (f family) only() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, nft.Equal([]byte{f.proto})}
}

// is matches one address of the header at the offset.
func (f family) is(offset uint32, a netip.Addr) []expr.Any {
	return []expr.Any{nft.Network(1, offset, f.length), nft.Equal(a.AsSlice())}
}

// subnet compares the address of the header at the offset with a subnet.
func (f family) subnet(offset uint32, p netip.Prefix, op expr.CmpOp) []expr.Any {
	if p.Bits() > 0 && p.Bits()%8 == 0 { // as nft(8) writes it
		length := uint32(p.Bits() / 8)
		return []expr.Any{nft.Network(1, offset, length), &expr.Cmp{Op: op, Register: 1, Data: p.Addr().AsSlice()[:length]}}
	}
	mask, none := make([]byte, f.length), make([]byte, f.length)
	for bit := range p.Bits() {
		mask[bit/8] |= 1 << (7 - bit%8)
	}
	return []expr.Any{nft.Network(1, offset, f.length), &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: f.length, Mask: mask, Xor: none},
		&expr.Cmp{Op: op, Register: 1, Data: p.Addr().AsSlice()}}
}

func protocol(p kernel.HostPort) []byte {
	return []byte{map[string]byte{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP}[p.Protocol]}
}

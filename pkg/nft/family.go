// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Family is what rules need to know of an address family: offsets in the IP header, and registers for addresses. Register 1 has 16 bytes,
// and registers 8 to 11 are its four parts of 4 bytes each.
type Family struct {
	Digit               string // suffix in the names of sets and chains
	Proto               byte
	Source, Destination uint32 // offsets
	Length              uint32 // length of an address
	Address             nftables.SetDatatype
	Second, Third       uint32 // registers after an address in register 1
}

// FamilyOf returns the Family of IPv4 or IPv6.
func FamilyOf(is4 bool) Family {
	if is4 {
		return Family{"4", unix.NFPROTO_IPV4, 12, 16, 4, nftables.TypeIPAddr, 9, 10}
	}
	return Family{"6", unix.NFPROTO_IPV6, 8, 24, 16, nftables.TypeIP6Addr, 2, 13}
}

// Families returns IPv4 and IPv6.
func Families() [2]Family { return [...]Family{FamilyOf(true), FamilyOf(false)} }

// Only returns expressions that limit a rule to packets of the address family.
func (f Family) Only() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, Equal([]byte{f.Proto})}
}

// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Family contains the properties of an address family that rules need: offsets in the IP header, and nf_tables registers for addresses.
// Register 1 has 16 bytes. Registers 8 to 11 are the four parts of register 1 with 4 bytes each.
type Family struct {
	Digit               string // suffix in the names of sets and chains
	Proto               byte
	Source, Destination uint32 // offsets
	Length              uint32 // length of an address
	Address             nftables.SetDatatype
	Second, Third       uint32 // registers after an address in register 1
}

// FamilyOf returns the Family of IPv4 if is4 is true, and the Family of IPv6 if is4 is false.
func FamilyOf(is4 bool) Family {
	if is4 {
		return Family{"4", unix.NFPROTO_IPV4, 12, 16, 4, nftables.TypeIPAddr, 9, 10}
	}
	return Family{"6", unix.NFPROTO_IPV6, 8, 24, 16, nftables.TypeIP6Addr, 2, 13}
}

// Families returns the Family of IPv4 and the Family of IPv6.
func Families() [2]Family { return [...]Family{FamilyOf(true), FamilyOf(false)} }

// Only limits a rule to packets of the address family. Only returns the nf_tables expressions for this condition.
func (f Family) Only() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, Equal([]byte{f.Proto})}
}

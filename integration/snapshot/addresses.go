// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// ifaProto is the netlink attribute that says which program added an address. It is kernelLinkLocal for a link-local address that the
// kernel adds when a link comes up.
const (
	ifaProto        = 11
	kernelLinkLocal = 3
)

// addressFlags returns the names of address flags, without those of duplicate address detection.
func addressFlags() map[uint32]string {
	return map[uint32]string{
		unix.IFA_F_SECONDARY: "secondary", unix.IFA_F_NODAD: "nodad", unix.IFA_F_DADFAILED: "dadfailed",
		unix.IFA_F_HOMEADDRESS: "home", unix.IFA_F_DEPRECATED: "deprecated", unix.IFA_F_PERMANENT: "permanent",
		unix.IFA_F_MANAGETEMPADDR: "mngtmpaddr", unix.IFA_F_NOPREFIXROUTE: "noprefixroute",
		unix.IFA_F_MCAUTOJOIN: "autojoin", unix.IFA_F_STABLE_PRIVACY: "stable-privacy",
	}
}

func addressSchema() schema {
	return schema{
		unix.IFA_ADDRESS:     omit(), // address formats it
		unix.IFA_LOCAL:       omit(),
		unix.IFA_LABEL:       {"label", str},
		unix.IFA_BROADCAST:   {"broadcast", ip},
		unix.IFA_CACHEINFO:   {"lifetime", lifetimeText},
		unix.IFA_FLAGS:       omit(),
		unix.IFA_RT_PRIORITY: {"metric", number},
		ifaProto:             {"proto", number},
	}
}

func (c *collector) collectAddresses(s *socket) error {
	messages, err := s.dump("addresses", unix.RTM_GETADDR, make([]byte, unix.SizeofIfAddrmsg))
	if err != nil {
		return err
	}
	by := addressSchema()
	for _, m := range messages {
		list, _ := parseAttrs(m[unix.SizeofIfAddrmsg:])
		link := c.links[native.Uint32(m[4:])]
		flags := uint32(m[2])
		if f := findAttr(list, unix.IFA_FLAGS); len(f) == 4 {
			flags = native.Uint32(f)
		}
		if madeByKernel(list, flags, link.mac) {
			continue
		}
		fields := append(c.toFields(list, by),
			field{"flags", names(flags, addressFlags())},
			field{"scope", fmt.Sprint(m[3])})
		c.add(fmt.Sprintf("address %s/%d dev %s", addressText(c, list), m[1], c.linkName(native.Uint32(m[4:]))), fields...)
	}
	return nil
}

func addressText(c *collector, list []attr) string {
	local, peer := findAttr(list, unix.IFA_LOCAL), findAttr(list, unix.IFA_ADDRESS)
	if local == nil || ip(c, local) == ip(c, peer) {
		return ip(c, peer)
	}
	return ip(c, local) + " peer " + ip(c, peer)
}

// madeByKernel reports whether the kernel itself added an address, as it does with a link-local one some time after a link comes up.
// Kernels before 5.18 do not say so; there, the address is compared with those that the kernel would generate.
func madeByKernel(list []attr, flags uint32, hardware string) bool {
	addr, ok := netip.AddrFromSlice(findAttr(list, unix.IFA_ADDRESS))
	if !ok || !addr.Is6() || !addr.IsLinkLocalUnicast() {
		return false
	}
	if proto := findAttr(list, ifaProto); len(proto) == 1 {
		return proto[0] == kernelLinkLocal
	}
	return flags&unix.IFA_F_STABLE_PRIVACY != 0 || addr == eui64(hardware)
}

// eui64 returns the link-local address that is derived from a MAC.
func eui64(hardware string) netip.Addr {
	var m [6]byte
	if _, err := fmt.Sscanf(hardware, "%02x:%02x:%02x:%02x:%02x:%02x", &m[0], &m[1], &m[2], &m[3], &m[4], &m[5]); err != nil {
		return netip.Addr{}
	}
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 0, 0, 0, 0, 0, 0, m[0] ^ 2, m[1], m[2], 0xff, 0xfe, m[3], m[4], m[5]})
}

// lifetimeText says only whether an address expires.
func lifetimeText(_ *collector, b []byte) string {
	const forever = ^uint32(0)
	if len(b) >= 8 && native.Uint32(b) == forever && native.Uint32(b[4:]) == forever {
		return "forever"
	}
	return "limited"
}

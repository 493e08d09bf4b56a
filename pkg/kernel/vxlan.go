// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// VXLAN is a VXLAN device (ip-link(8)) that does not learn forwarding entries.
type VXLAN struct {
	Name  string
	VNI   int
	Port  int // UDP
	Local netip.Addr
	MAC   net.HardwareAddr
	MTU   int // 0 for the kernel's default
}

// ForeignLink is the error of EnsureVXLAN if another program's link conflicts with the device.
type ForeignLink struct {
	Name string // name of the link
	Why  string // reason of the conflict
}

func (e *ForeignLink) Error() string { return fmt.Sprintf("link %s is in the way: %s", e.Name, e.Why) }

// FoundVXLAN is an existing VXLAN device.
type FoundVXLAN struct {
	Link
	VXLAN VXLAN
	Other bool // it learns, has its own remote address or link, or takes the VNI from each packet
}

// VXLANs returns the VXLAN devices of the namespace.
func (n *NS) VXLANs() (list []FoundVXLAN, err error) {
	// Package netlink cannot list the links of only one kind.
	replies, err := n.listObjects(unix.RTM_GETLINK, nl.NewIfInfomsg(unix.AF_UNSPEC),
		nested(unix.IFLA_LINKINFO, nl.NewRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("vxlan"))))
	if err := fault.Ignore(err, unix.EOPNOTSUPP); err != nil { // the kernel does not know the kind
		return nil, fmt.Errorf("link show type vxlan: %w", err)
	}
	for _, message := range replies {
		link, err := parseLink(message)
		if err != nil {
			return nil, fmt.Errorf("link show type vxlan: %w", err)
		}
		device, _ := netlink.LinkDeserialize(nil, message) // parseLink had no error
		if v, ok := device.(*netlink.Vxlan); ok {
			local, _ := netip.AddrFromSlice(v.SrcAddr)
			list = append(list, FoundVXLAN{link, VXLAN{link.Name, v.VxlanId, v.Port, local, link.MAC, link.MTU},
				v.Learning || v.FlowBased || v.Group != nil || v.VtepDevIndex != 0})
		}
	}
	return list, nil
}

// sameImmutable reports whether the device has all wanted properties that the kernel cannot change.
func (f FoundVXLAN) sameImmutable(v VXLAN) bool {
	return !f.Other && f.VXLAN.VNI == v.VNI && f.VXLAN.Port == v.Port && f.VXLAN.Local == v.Local
}

// EnsureVXLAN ensures that the VXLAN device exists, is up, and is in the device group by which the agent recognizes its own devices. It
// returns the device and the number of changes. First it deletes devices of the group with another name, VNI, port or local address, and
// the kernel deletes the nexthop objects that use them. If another program has a conflicting device, it returns a *ForeignLink.
func (n *NS) EnsureVXLAN(v VXLAN, group uint32) (link Link, changes int, err error) {
	own, err := n.ownVXLAN(v, group)
	if err != nil {
		return Link{}, 0, err
	}
	for _, f := range own {
		if f.Name == v.Name && f.sameImmutable(v) {
			changes, err := n.adjustVXLAN(f, v)
			return f.Link, changes, err
		}
	}
	for _, f := range own {
		if err := n.DelLink(f.Name); err != nil {
			return Link{}, changes, err
		}
		changes++
	}
	if err := n.addVXLAN(v, group); err != nil {
		return Link{}, changes, err
	}
	link, ok, err := n.Link(v.Name)
	if err == nil && !ok {
		err = fmt.Errorf("link %s: %w", v.Name, unix.ENODEV)
	}
	return link, changes + 1, err
}

// ownVXLAN returns the VXLAN devices of the group, or a *ForeignLink if another program's device has the name, or the VNI and port.
func (n *NS) ownVXLAN(v VXLAN, group uint32) (own []FoundVXLAN, err error) {
	all, err := n.VXLANs()
	if err != nil {
		return nil, err
	}
	for _, f := range all {
		switch {
		case f.Traits.Group == group:
			own = append(own, f)
		case f.VXLAN.VNI == v.VNI && f.VXLAN.Port == v.Port && !f.isExternal():
			return nil, &ForeignLink{f.Name, fmt.Sprintf("it has VNI %d on port %d, and another program made it", v.VNI, v.Port)}
		}
	}
	link, ok, err := n.Link(v.Name)
	if err != nil || !ok || link.Kind == "vxlan" && link.Traits.Group == group {
		return own, err
	}
	kind := link.Kind
	if kind == "" {
		kind = "hardware"
	}
	return nil, &ForeignLink{v.Name, fmt.Sprintf("another program made it (%s)", kind)}
}

// isExternal reports whether the device takes the VNI from each packet's metadata (external in ip-link(8)).
func (f FoundVXLAN) isExternal() bool { return f.Other && f.VXLAN.VNI == 0 }

func (n *NS) addVXLAN(v VXLAN, group uint32) error {
	op := fmt.Sprintf("link add %s type vxlan id %d dstport %d local %s nolearning", v.Name, v.VNI, v.Port, v.Local)
	return fault.Change(op, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.HardwareAddr, attrs.MTU, attrs.Group, attrs.Flags = v.Name, v.MAC, v.MTU, group, net.FlagUp
		err := n.h.LinkAdd(&netlink.Vxlan{LinkAttrs: attrs, VxlanId: v.VNI, Port: v.Port, SrcAddr: v.Local.AsSlice()})
		if errors.Is(err, unix.EOPNOTSUPP) {
			return &MissingFeature{"VXLAN (CONFIG_VXLAN)", err}
		}
		return err
	})
}

// adjustVXLAN changes an existing device as far as the kernel allows, and returns the number of changes.
func (n *NS) adjustVXLAN(f FoundVXLAN, v VXLAN) (changes int, err error) {
	for _, c := range []struct {
		wanted bool
		change func() error
	}{
		{!bytes.Equal(f.MAC, v.MAC), func() error { return n.SetMAC(f.Link, v.MAC) }},
		{v.MTU != 0 && f.MTU != v.MTU, func() error { return n.SetMTU(f.Link, v.MTU) }},
		{!f.Up, func() error { return n.SetUp(f.Link) }},
	} {
		if !c.wanted {
			continue
		}
		if err := c.change(); err != nil {
			return changes, err
		}
		changes++
	}
	return changes, nil
}

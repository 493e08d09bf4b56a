// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// VLAN is one VLAN of a bridge port.
type VLAN struct {
	ID       uint16
	PVID     bool // untagged frames that arrive belong to this VLAN
	Untagged bool // frames leave without a tag
}

// VLANs is the VLANs of one bridge port, sorted by ID.
type VLANs []VLAN

// Without returns a copy of the list without the VLAN with the ID.
func (v VLANs) Without(id uint16) VLANs {
	return slices.DeleteFunc(slices.Clone(v), func(vlan VLAN) bool { return vlan.ID == id })
}

// Has reports whether the list contains the VLAN with the ID, with any flags.
func (v VLANs) Has(id uint16) bool {
	return slices.ContainsFunc(v, func(vlan VLAN) bool { return vlan.ID == id })
}

// vlanRanges splits the list into ranges of consecutive IDs with the same flags. The kernel accepts PVID only in a range of one VLAN.
func (v VLANs) vlanRanges() iter.Seq2[VLAN, uint16] {
	return func(yield func(first VLAN, last uint16) bool) {
		for i := 0; i < len(v); {
			end := i + 1
			for end < len(v) && !v[i].PVID && v[end] == (VLAN{ID: v[end-1].ID + 1, Untagged: v[i].Untagged}) {
				end++
			}
			if !yield(v[i], v[end-1].ID) {
				return
			}
			i = end
		}
	}
}

// String formats the VLANs like bridge-vlan(8).
func (v VLANs) String() string {
	var words []string
	for first, last := range v.vlanRanges() {
		word := fmt.Sprint(first.ID)
		if last != first.ID {
			word = fmt.Sprintf("%d-%d", first.ID, last)
		}
		if first.PVID {
			word += " pvid"
		}
		if first.Untagged {
			word += " untagged"
		}
		words = append(words, word)
	}
	if len(words) == 0 {
		return "none"
	}
	return strings.Join(words, ", ")
}

// HasVLANFiltering reports whether the kernel's bridges support VLAN filtering (CONFIG_BRIDGE_VLAN_FILTERING). It requests a bridge that no
// kernel can create, with an invalid VLAN protocol and a name that is taken, then with an invalid namespace instead of that name. A kernel
// with VLAN filtering reports the protocol first; before 6.13, it does so only once the module bridge is loaded, which the second request
// causes.
func (n *Node) HasVLANFiltering() (bool, error) {
	var err error
	for _, impossible := range []*nl.RtAttr{
		nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated("lo")), // EEXIST
		attribute32(unix.IFLA_NET_NS_FD, ^uint32(0)),            // EBADF
	} {
		err = fault.Retry(func() error {
			return n.sendChange(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, nl.NewIfInfomsg(unix.AF_UNSPEC), impossible,
				linkInfo("bridge", nl.NewRtAttr(nl.IFLA_BR_VLAN_PROTOCOL, nl.Uint16Attr(0))))
		})
		if errors.Is(err, unix.EPROTONOSUPPORT) {
			return true, nil
		}
	}
	if errors.Is(err, unix.EBADF) {
		return false, nil
	}
	return false, fmt.Errorf("probe bridge VLAN filtering: %w", err)
}

// SetVLANFiltering enables VLAN filtering on a bridge.
func (n *Node) SetVLANFiltering(bridge Link) error {
	return fault.Change("link set "+bridge.Name+" type bridge vlan_filtering 1", func() error {
		return n.sendChange(unix.RTM_NEWLINK, 0, linkHeader(bridge.Index),
			linkInfo("bridge", nl.NewRtAttr(nl.IFLA_BR_VLAN_FILTERING, nl.Uint8Attr(1))))
	})
}

// PortVLANs returns the VLANs of one bridge port without reading the others (RTM_GETVLAN, since Linux 5.6, which package netlink lacks).
func (n *Node) PortVLANs(port Link) (VLANs, error) {
	replies, err := n.listObjects(unix.RTM_GETVLAN, vlanMessage(port.Index))
	if err != nil {
		return nil, fmt.Errorf("bridge vlan show dev %s: %w", port.Name, err)
	}
	var out VLANs
	for _, reply := range replies {
		if out, err = out.appendReply(reply); err != nil {
			return nil, fmt.Errorf("bridge vlan show dev %s: %w", port.Name, err)
		}
	}
	return out, nil
}

// vlanMessage is the header of a request about the VLANs of a link, and its ifindex (struct br_vlan_msg in include/uapi/linux/if_bridge.h).
type vlanMessage uint32

func (m vlanMessage) Len() int { return 8 }

func (m vlanMessage) Serialize() []byte {
	b := []byte{unix.AF_BRIDGE, 0, 0, 0}
	return binary.NativeEndian.AppendUint32(b, uint32(m))
}

// Attributes of a VLAN entry in replies to RTM_GETVLAN.
const (
	entryInfo  = 1 // BRIDGE_VLANDB_ENTRY_INFO, struct bridge_vlan_info
	entryRange = 2 // BRIDGE_VLANDB_ENTRY_RANGE, the last ID
)

func (v VLANs) appendReply(reply []byte) (VLANs, error) {
	entries, err := nl.ParseRouteAttr(reply[min(vlanMessage(0).Len(), len(reply)):])
	for _, entry := range entries {
		attrs, err := nl.ParseRouteAttr(entry.Value)
		if err != nil {
			return nil, err
		}
		var first VLAN
		last := uint16(0)
		for _, a := range attrs {
			switch {
			case a.Attr.Type == entryInfo && len(a.Value) >= nl.SizeofBridgeVlanInfo:
				flags := binary.NativeEndian.Uint16(a.Value)
				first = VLAN{binary.NativeEndian.Uint16(a.Value[2:]), flags&nl.BRIDGE_VLAN_INFO_PVID != 0, flags&nl.BRIDGE_VLAN_INFO_UNTAGGED != 0}
			case a.Attr.Type == entryRange && len(a.Value) >= 2:
				last = binary.NativeEndian.Uint16(a.Value)
			}
		}
		for id := first.ID; id <= max(first.ID, last) && id != 0; id++ {
			v = append(v, VLAN{id, first.PVID, first.Untagged})
		}
	}
	return v, err
}

// ChangeVLANs changes the VLANs of a bridge port from has to want: all additions in one request, all removals in another.
func (n *Node) ChangeVLANs(port Link, has, want VLANs) error {
	add := slices.DeleteFunc(slices.Clone(want), func(v VLAN) bool { return slices.Contains(has, v) })
	del := slices.DeleteFunc(slices.Clone(has), func(v VLAN) bool { return want.Has(v.ID) })
	if len(add) > 0 {
		err := fault.Change(fmt.Sprintf("bridge vlan add dev %s vid %s", port.Name, add), func() error {
			return n.sendChange(unix.RTM_SETLINK, 0, bridgeHeader(port), add.spec())
		})
		if err != nil {
			return err
		}
	}
	if len(del) == 0 {
		return nil
	}
	return fault.Change(fmt.Sprintf("bridge vlan del dev %s vid %s", port.Name, del), func() error {
		return n.sendChange(unix.RTM_DELLINK, 0, bridgeHeader(port), del.spec())
	})
}

func (v VLANs) spec() *nl.RtAttr {
	spec := nl.NewRtAttr(unix.IFLA_AF_SPEC, nil)
	for first, last := range v.vlanRanges() {
		info := nl.BridgeVlanInfo{Vid: first.ID}
		if first.PVID {
			info.Flags |= nl.BRIDGE_VLAN_INFO_PVID
		}
		if first.Untagged {
			info.Flags |= nl.BRIDGE_VLAN_INFO_UNTAGGED
		}
		end := info
		if last != first.ID {
			info.Flags |= nl.BRIDGE_VLAN_INFO_RANGE_BEGIN
			end.Vid, end.Flags = last, end.Flags|nl.BRIDGE_VLAN_INFO_RANGE_END
		}
		spec.AddRtAttr(nl.IFLA_BRIDGE_VLAN_INFO, info.Serialize())
		if last != first.ID {
			spec.AddRtAttr(nl.IFLA_BRIDGE_VLAN_INFO, end.Serialize())
		}
	}
	return spec
}

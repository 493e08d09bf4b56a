// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// Nexthop is a nexthop object (ip-nexthop(8)), which package netlink lacks. Routes refer to it by its ID, so one change moves many routes
// to another gateway.
type Nexthop struct {
	ID      uint32
	Gateway netip.Addr // may have another family than the route
	Link    int        // ifindex
	OnLink  bool       // the gateway is on-link without a route to it
}

// String formats the object like ip-nexthop(8), with the ifindex of its link.
func (h Nexthop) String() string {
	text := fmt.Sprintf("id %d via %s dev %d", h.ID, h.Gateway, h.Link)
	if h.OnLink {
		text += " onlink"
	}
	return text
}

// FoundNexthop is an existing nexthop object. Gateway is zero for groups and blackholes.
type FoundNexthop struct {
	Nexthop
	Protocol int // of the program that added it
}

// Nexthops returns the nexthop objects of all programs, because the kernel cannot filter them by protocol. Kernels before 5.3 have none.
func (n *NS) Nexthops() (list []FoundNexthop, err error) {
	replies, err := n.listObjects(unix.RTM_GETNEXTHOP, &nhmsg{})
	if err := fault.Ignore(err, unix.EOPNOTSUPP); err != nil {
		return nil, fmt.Errorf("nexthop show: %w", err)
	}
	list = make([]FoundNexthop, 0, len(replies))
	for _, message := range replies {
		if h, ok := parseNexthop(message); ok {
			list = append(list, h)
		}
	}
	return list, nil
}

func parseNexthop(message []byte) (h FoundNexthop, ok bool) {
	if len(message) < sizeofNhmsg {
		return h, false
	}
	body := message[sizeofNhmsg:]
	h.Protocol = int(message[2])
	h.OnLink = binary.NativeEndian.Uint32(message[4:])&unix.RTNH_F_ONLINK != 0
	h.ID, h.Link = number32(attributeOf(body, unix.NHA_ID)), int(number32(attributeOf(body, unix.NHA_OIF)))
	h.Gateway, _ = netip.AddrFromSlice(attributeOf(body, unix.NHA_GATEWAY))
	return h, h.ID != 0
}

// AddNexthop adds a nexthop object. It returns unix.EEXIST if the ID is taken.
func (n *NS) AddNexthop(h Nexthop, protocol int) error {
	return n.setNexthop("nexthop add ", h, protocol, unix.NLM_F_EXCL)
}

// ReplaceNexthop adds a nexthop object, or changes it for all routes that refer to it, in one request.
func (n *NS) ReplaceNexthop(h Nexthop, protocol int) error {
	return n.setNexthop("nexthop replace ", h, protocol, unix.NLM_F_REPLACE)
}

func (n *NS) setNexthop(op string, h Nexthop, protocol, flags int) error {
	return fault.Change(op+h.String(), func() error {
		header := &nhmsg{family: familyOf(h.Gateway.Is4()), protocol: byte(protocol)}
		if h.OnLink {
			header.flags = unix.RTNH_F_ONLINK
		}
		return lacksNexthops(n.sendChange(unix.RTM_NEWNEXTHOP, unix.NLM_F_CREATE|flags, header,
			attribute32(unix.NHA_ID, h.ID),
			attribute32(unix.NHA_OIF, uint32(h.Link)),
			nl.NewRtAttr(unix.NHA_GATEWAY, h.Gateway.AsSlice())))
	})
}

// DelNexthop deletes a nexthop object and, with it, all routes that refer to it. It is a no-op if the object is missing.
func (n *NS) DelNexthop(id uint32) error {
	return fault.Change(fmt.Sprintf("nexthop del id %d", id), func() error {
		return fault.Ignore(n.sendChange(unix.RTM_DELNEXTHOP, 0, &nhmsg{}, attribute32(unix.NHA_ID, id)), unix.ENOENT)
	})
}

func lacksNexthops(err error) error {
	if errors.Is(err, unix.EOPNOTSUPP) {
		return &MissingFeature{"nexthop objects (since 5.3)", err}
	}
	return err
}

// nhmsg is the header of messages about nexthop objects (struct nhmsg in include/uapi/linux/nexthop.h).
type nhmsg struct {
	family, scope, protocol byte
	flags                   uint32
}

const sizeofNhmsg = 8

func (*nhmsg) Len() int { return sizeofNhmsg }

func (m *nhmsg) Serialize() []byte {
	return binary.NativeEndian.AppendUint32([]byte{m.family, m.scope, m.protocol, 0}, m.flags)
}

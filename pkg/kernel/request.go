// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/nft"
)

// send sends a request about an object and waits for the kernel's reply or acknowledgement.
func (n *NS) send(kind, flags int, header nl.NetlinkRequestData, attributes ...*nl.RtAttr) (replies [][]byte, err error) {
	req := nl.NewNetlinkRequest(kind, flags)
	req.Sockets = n.sockets
	req.AddData(header)
	for _, a := range attributes {
		req.AddData(a)
	}
	return req.Execute(unix.NETLINK_ROUTE, 0)
}

// sendChange sends a request that changes an object, and waits for the acknowledgement.
func (n *NS) sendChange(kind, flags int, header nl.NetlinkRequestData, attributes ...*nl.RtAttr) error {
	_, err := n.send(kind, flags|unix.NLM_F_ACK, header, attributes...)
	return err
}

// listObjects returns the kernel objects that match the header and the attributes.
func (n *NS) listObjects(kind int, header nl.NetlinkRequestData, attributes ...*nl.RtAttr) ([][]byte, error) {
	return dump(func() ([][]byte, error) { return n.send(kind, unix.NLM_F_DUMP, header, attributes...) })
}

// dump repeats a request that the kernel interrupted, for example because the table changed meanwhile.
func dump[T any](request func() (T, error)) (result T, err error) {
	for range mostAttempts {
		if result, err = request(); !isInterrupted(err) {
			break
		}
	}
	return result, err
}

// mostAttempts limits how often dump repeats a request.
const mostAttempts = 30

func isInterrupted(err error) bool {
	return err != nil && fault.Ignore(err, netlink.ErrDumpInterrupted, unix.EINTR) == nil
}

func nested(kind int, attributes ...*nl.RtAttr) *nl.RtAttr {
	outer := nl.NewRtAttr(kind, nil)
	for _, a := range attributes {
		outer.AddChild(a)
	}
	return outer
}

// linkInfo returns the attribute with a link's kind and the settings of this kind.
func linkInfo(kind string, settings ...*nl.RtAttr) *nl.RtAttr {
	return nested(unix.IFLA_LINKINFO, nl.NewRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated(kind)), nested(nl.IFLA_INFO_DATA, settings...))
}

func attribute32(kind int, value uint32) *nl.RtAttr { return nl.NewRtAttr(kind, nl.Uint32Attr(value)) }

// familyOf returns AF_INET or AF_INET6, which nf_tables and netlink share.
func familyOf(is4 bool) uint8 { return nft.FamilyOf(is4).Proto }

// number32 returns the number in a netlink attribute, or 0 unless it has 4 bytes.
func number32(value []byte) uint32 {
	if len(value) != 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(value)
}

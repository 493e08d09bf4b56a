// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// sendChange sends a request that changes an object, and waits for the acknowledgement.
func (n *NS) sendChange(kind, flags int, header nl.NetlinkRequestData, attributes ...*nl.RtAttr) error {
	req := n.newRequest(kind, flags)
	req.AddData(header)
	for _, a := range attributes {
		req.AddData(a)
	}
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// listObjects returns the kernel objects that match the header and the attributes. listObjects uses a socket with the option
// NETLINK_GET_STRICT_CHK. Without this option, the kernel ignores the attributes and returns all objects.
func (n *NS) listObjects(kind int, reply uint16, header nl.NetlinkRequestData, attributes ...*nl.RtAttr) (replies [][]byte, err error) {
	if n.strict == nil {
		if n.strict, err = n.strictSocket(); err != nil {
			return nil, err
		}
	}
	err = retryInterrupted(func() (err error) {
		req := nl.NewNetlinkRequest(kind, unix.NLM_F_DUMP)
		req.Sockets = n.strict
		req.AddData(header)
		for _, a := range attributes {
			req.AddData(a)
		}
		replies, err = req.Execute(unix.NETLINK_ROUTE, reply)
		return err
	})
	return replies, err
}

// strictSocket opens the socket for listObjects.
func (n *NS) strictSocket() (sockets map[int]*nl.SocketHandle, err error) {
	err = n.inNamespace(func() error {
		s, err := nl.Subscribe(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		limit := unix.NsecToTimeval(requestTimeout.Nanoseconds())
		_ = s.SetReceiveTimeout(&limit)
		if err := unix.SetsockoptInt(s.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
			s.Close()
			return &MissingFeature{"strict checking of netlink requests (since 4.20)", err}
		}
		sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: s}}
		return nil
	})
	return sockets, err
}

// number32 returns the number in a netlink attribute of 4 bytes, or 0 if the attribute has another length.
func number32(value []byte) uint32 {
	if len(value) != 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(value)
}

// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// FixedPort returns the ifindex of the port to which a fixed entry of the bridge's forwarding database sends frames for a MAC, or the
// bridge's own ifindex if the node receives them. It returns 0 if the bridge has no entry or has learned it. known is false on Linux before
// 5.0, which cannot look up a single entry. On a bridge that filters VLANs, FixedPort reads the entry of the default VLAN.
func (n *NS) FixedPort(bridge Link, mac net.HardwareAddr) (index int, known bool, err error) {
	attributes := []*nl.RtAttr{nl.NewRtAttr(unix.NDA_LLADDR, mac), attribute32(unix.NDA_MASTER, uint32(bridge.Index))}
	if bridge.FiltersVLANs {
		attributes = append(attributes, nl.NewRtAttr(unix.NDA_VLAN, nl.Uint16Attr(bridge.DefaultVLAN)))
	}
	replies, err := n.send(unix.RTM_GETNEIGH, unix.NLM_F_ACK, &netlink.Ndmsg{Family: unix.AF_BRIDGE}, attributes...)
	switch {
	case errors.Is(err, unix.ENOENT):
		return 0, true, nil
	case errors.Is(err, unix.EOPNOTSUPP):
		return 0, false, nil
	case err != nil:
		return 0, false, fmt.Errorf("fdb get %s br %s: %w", mac, bridge.Name, err)
	}
	for _, reply := range replies {
		switch e, _ := parseNeighbour(reply); {
		case e.permanent: // also if the MAC is that of a port, as the MAC of a bridge may be
			index = bridge.Index
		case e.static:
			index = e.link
		}
	}
	return index, true, nil
}

// AddOwnEntry adds the MAC of a bridge to its forwarding database, in each VLAN of the bridge. The kernel does that with each new bridge;
// without the entry, the bridge sends frames for the node to its ports.
func (n *NS) AddOwnEntry(bridge Link) error {
	return fault.Change(fmt.Sprintf("fdb add %s dev %s self permanent", bridge.MAC, bridge.Name), func() error {
		return n.sendChange(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE, &netlink.Ndmsg{Family: unix.AF_BRIDGE, Index: uint32(bridge.Index),
			State: unix.NUD_PERMANENT, Flags: unix.NTF_SELF}, nl.NewRtAttr(unix.NDA_LLADDR, bridge.MAC))
	})
}

// subscribeFixed opens a socket for messages about deleted permanent entries of forwarding databases. The kernel drops the others of their
// group, because neighbours and learned MACs, of which tenants can forge many, change all the time.
func subscribeFixed() (*os.File, error) {
	f, err := subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_NEIGH)
	if err != nil {
		return nil, err
	}
	const kind, family, state = 4, unix.NLMSG_HDRLEN, unix.NLMSG_HDRLEN + 8 // offsets of nlmsg_type, ndm_family and ndm_state
	const load, equal, anyBit = unix.BPF_LD | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ, unix.BPF_JMP | unix.BPF_JSET
	program := []unix.SockFilter{
		{Code: load | unix.BPF_H, K: kind}, {Code: equal, K: loaded(unix.RTM_DELNEIGH), Jf: 5},
		{Code: load | unix.BPF_B, K: family}, {Code: equal, K: unix.AF_BRIDGE, Jf: 3},
		{Code: load | unix.BPF_H, K: state}, {Code: anyBit, K: loaded(unix.NUD_PERMANENT), Jf: 1},
		{Code: unix.BPF_RET, K: largestEvent}, {Code: unix.BPF_RET, K: 0},
	}
	raw, err := f.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) {
			filter := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
			_ = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &filter) // without it, routeRemovals ignores more
		})
	}
	return f, err
}

// loaded returns the value that a socket filter, which loads in network byte order, gets for a number in the machine's.
func loaded(number uint16) uint32 {
	return uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, number)))
}

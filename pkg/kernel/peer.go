// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// ownNetns is the PeerNetns of a link with no peer, or with a peer in the same namespace.
const ownNetns = -1

// PeerOf returns the peer of a veth or netkit end in this namespace. end is in the namespace of the file, or in this one if netns is nil.
// ok is false if the peer is elsewhere.
func (n *NS) PeerOf(end Link, netns Namespace) (link Link, ok bool, err error) {
	if link, ok, err = n.LinkByIndex(end.Peer); err != nil || !ok {
		return Link{}, false, err
	}
	if ok, err = n.Paired(link, end, netns); err != nil || !ok {
		return Link{}, false, err
	}
	return link, true, nil
}

// Paired reports whether a link of this namespace and end form one veth or netkit pair. netns is as in PeerOf. Two ends that name each
// other's ifindex are no evidence: each namespace has its own ifindexes, and a pod chooses those of its links. The kernel's ID of the
// peer's namespace is evidence: only an admin of this namespace can create links in it.
func (n *NS) Paired(link, end Link, netns Namespace) (bool, error) {
	if link.Kind != end.Kind || link.Peer != end.Index || end.Peer != link.Index {
		return false, nil
	}
	return n.LeadsInto(link, netns)
}

// LeadsInto reports whether the peer of a veth or netkit link of this namespace is in the namespace of the file. A nil netns stands for
// this namespace.
func (n *NS) LeadsInto(link Link, netns Namespace) (bool, error) {
	if link.Peer == 0 || link.Kind != "veth" && link.Kind != "netkit" {
		return false, nil
	}
	if netns == nil {
		return link.PeerNetns == ownNetns, nil
	}
	id, err := n.netnsID(netns)
	return err == nil && id >= 0 && id == link.PeerNetns, err
}

// netnsID returns this namespace's ID for another one, or -1. Reading a link whose peer is there assigns an ID.
func (n *NS) netnsID(netns Namespace) (id int, err error) {
	var replies [][]byte
	header := nl.NewRtGenMsg()
	err = retry(func() (err error) {
		req := n.request(unix.RTM_GETNSID, 0)
		req.AddData(header)
		req.AddData(nl.NewRtAttr(netlink.NETNSA_FD, nl.Uint32Attr(uint32(netns.Fd()))))
		replies, err = req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNSID)
		return err
	})
	for _, reply := range replies {
		if value := attribute(reply[min(header.Len(), len(reply)):], netlink.NETNSA_NSID); len(value) >= 4 {
			return int(int32(binary.NativeEndian.Uint32(value))), nil
		}
	}
	return ownNetns, wrapped("netns id of "+nameOf(netns), err)
}

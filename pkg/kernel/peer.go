// SPDX-License-Identifier: Apache-2.0

package kernel

// ownNetns is the value of PeerNetns if a link has no peer, or if its peer is in the same namespace.
const ownNetns = -1

// PeerOf returns the peer of a veth or netkit link. The result ok is false if the peer is not in the namespace n. The argument netns is the
// namespace of the given link. If netns is nil, the given link is in the namespace n.
func (n *NS) PeerOf(end Link, netns Namespace) (link Link, ok bool, err error) {
	if link, ok, err = n.LinkByIndex(end.Peer); err != nil || !ok {
		return Link{}, false, err
	}
	if ok, err = n.Paired(link, end, netns); err != nil || !ok {
		return Link{}, false, err
	}
	return link, true, nil
}

// Paired reports whether two links form one veth or netkit pair. The first link is in the namespace n. The second link is in the namespace
// netns, or in the namespace n if netns is nil. Equal ifindexes do not prove that two links are a pair. Each namespace has its own
// ifindexes, and a pod can choose the ifindexes of its links. Therefore, Paired also compares the kernel's ID of the peer's namespace. A
// pod cannot forge this ID, because only an admin of the namespace n can create links in n.
func (n *NS) Paired(link, end Link, netns Namespace) (bool, error) {
	if link.Kind != end.Kind || link.Peer != end.Index || end.Peer != link.Index {
		return false, nil
	}
	return n.LeadsInto(link, netns)
}

// LeadsInto reports whether the peer of a veth or netkit link in the namespace n is in the namespace netns. If netns is nil, LeadsInto
// reports whether the peer is also in n.
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

// netnsID returns the ID that the namespace n uses for the namespace netns (ip-netns(8)), or -1 if netns has no ID in n. The kernel assigns
// the ID when a program reads a link with a peer in the other namespace.
func (n *NS) netnsID(netns Namespace) (int, error) {
	id, err := dump(func() (int, error) { return n.h.GetNetNsIdByFd(int(netns.Fd())) })
	return id, wrapped("netns id of "+nameOf(netns), err)
}

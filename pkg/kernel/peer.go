// SPDX-License-Identifier: Apache-2.0

package kernel

// ownNetns is the PeerNetns of a link without a peer, or with one in the same namespace.
const ownNetns = -1

// PeerOf returns the peer of a veth or netkit link. ok is false if it is not in namespace n. The link is in netns, or in n if netns is nil.
func (n *NS) PeerOf(end Link, netns Namespace) (link Link, ok bool, err error) {
	if link, ok, err = n.LinkByIndex(end.Peer); err != nil || !ok {
		return Link{}, false, err
	}
	if ok, err = n.Paired(link, end, netns); err != nil || !ok {
		return Link{}, false, err
	}
	return link, true, nil
}

// Paired reports whether two links form one veth or netkit pair. The first one is in namespace n, the second one in netns, or in n if netns
// is nil. Equal ifindexes prove nothing, because each namespace has its own and a pod can choose those of its links. The kernel's ID of the
// peer's namespace does, because only an admin of n can create links in n.
func (n *NS) Paired(link, end Link, netns Namespace) (bool, error) {
	if link.Kind != end.Kind || link.Peer != end.Index || end.Peer != link.Index {
		return false, nil
	}
	return n.LeadsInto(link, netns)
}

// LeadsInto reports whether the peer of a veth or netkit link in namespace n is in netns, or in n too if netns is nil.
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

// netnsID returns netns' ID in namespace n (ip-netns(8)), or -1. A namespace gets its ID when a program reads a link with a peer there.
func (n *NS) netnsID(netns Namespace) (int, error) {
	id, err := dump(func() (int, error) { return n.h.GetNetNsIdByFd(int(netns.Fd())) })
	return id, wrapped("netns id of "+nameOf(netns), err)
}

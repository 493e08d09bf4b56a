// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// MoveLink moves a link into another namespace and renames it, in one request. There the link is down, has no addresses, keeps its
// alternative names, and often has another ifindex. unix.EEXIST means that the target namespace has a link with the new name or an
// alternative name of this one; the link is then in its old namespace, but may be down, because it was moved back. unix.EINVAL means that
// the kernel cannot move links of this kind.
func (n *NS) MoveLink(link Link, to Namespace, name string) error {
	return fault.Change(fmt.Sprintf("link set %s netns %s name %s", link.Name, nameOf(to), name), func() error {
		err := n.move(link, to, name)
		if errors.Is(err, unix.EEXIST) {
			return errors.Join(err, n.moveBack(link, to))
		}
		return err
	})
}

// File opens the file of the namespace, for example for MoveLink. /proc/self/ns/net would be the main thread's.
func (n *NS) File() (f *os.File, err error) {
	err = n.inNamespace(func() (err error) {
		f, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	return f, err
}

func (n *NS) move(link Link, to Namespace, name string) error {
	return n.sendChange(unix.RTM_SETLINK, 0, linkHeader(link.Index), attribute32(unix.IFLA_NET_NS_FD, uint32(to.Fd())),
		nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
}

// moveBack moves a link back from the target namespace after a failed move. The kernel moves it under its old name before it renames it
// (do_setlink in net/core/rtnetlink.c), so it stays there with its old name if the new one is taken.
func (n *NS) moveBack(link Link, from Namespace) error {
	if now, ok, err := n.LinkByIndex(link.Index); err != nil || ok && now.Name == link.Name {
		return err
	}
	there, err := Open(from)
	if err != nil {
		return err
	}
	defer there.Close()
	lost, ok, err := there.Link(link.Name)
	if err != nil || !ok {
		return err
	}
	here, err := n.File()
	if err != nil {
		return err
	}
	defer here.Close()
	if err := there.move(lost, here, link.Name); err != nil {
		return fmt.Errorf("and fetch it back from there: %w", err)
	}
	return nil
}

// Rename changes a link's name. Before Linux 6.2, the link must be down. It returns unix.EEXIST if another link has the name.
func (n *NS) Rename(link Link, name string) error {
	return fault.Change(fmt.Sprintf("link set %s name %s", link.Name, name), func() error {
		return n.h.LinkSetName(byIndex(link.Index), name)
	})
}

// SetAlias sets the alias of a link, which "ip link" prints. An empty text removes it.
func (n *NS) SetAlias(link Link, text string) error {
	return fault.Change(fmt.Sprintf("link set %s alias %q", link.Name, text), func() error {
		return n.h.LinkSetAlias(byIndex(link.Index), text)
	})
}

// AddAltName adds an alternative name to a link. It returns unix.EEXIST if a link has it as its name or alternative name.
func (n *NS) AddAltName(link Link, name string) error {
	return fault.Change(fmt.Sprintf("link property add dev %s altname %s", link.Name, name), func() error {
		return n.h.LinkAddAltName(byIndex(link.Index), name)
	})
}

// DelAltName removes an alternative name of a link. It is a no-op if the link does not have it.
func (n *NS) DelAltName(link Link, name string) error {
	return fault.Change(fmt.Sprintf("link property del dev %s altname %s", link.Name, name), func() error {
		return fault.Ignore(n.h.LinkDelAltName(byIndex(link.Index), name), unix.ENOENT)
	})
}

// SetTxQueue sets the length of the transmit queue in packets.
func (n *NS) SetTxQueue(link Link, packets int) error {
	return fault.Change(fmt.Sprintf("link set %s txqueuelen %d", link.Name, packets), func() error {
		return n.h.LinkSetTxQLen(byIndex(link.Index), packets)
	})
}

// DelXDP detaches all XDP programs of a link, which see received frames before the kernel's network stack. It returns unix.EBUSY if one is
// attached by a bpf link, because the kernel detaches it only when its owner closes this.
func (n *NS) DelXDP(link Link) error {
	// XDP_FLAGS_DRV_MODE, XDP_FLAGS_SKB_MODE and XDP_FLAGS_HW_MODE. With XDP_ATTACHED_MULTI (4), programs are in several modes.
	modes := []uint32{1 << 2, 1 << 1, 1 << 3}
	if mode := int(link.XDP); mode < 4 {
		modes = modes[mode-1 : mode]
	}
	for _, mode := range modes {
		if err := n.setXDP(link, -1, mode); err != nil {
			return err
		}
	}
	return nil
}

// setXDP attaches the XDP program fd, or detaches the current one if fd is -1, which package netlink can do only in the caller's namespace.
func (n *NS) setXDP(link Link, fd int32, flags uint32) error {
	return fault.Change(fmt.Sprintf("link set %s xdp %d", link.Name, fd), func() error {
		return n.sendChange(unix.RTM_SETLINK, 0, linkHeader(link.Index), nested(unix.IFLA_XDP|unix.NLA_F_NESTED,
			attribute32(nl.IFLA_XDP_FD, uint32(fd)), attribute32(nl.IFLA_XDP_FLAGS, flags)))
	})
}

// SetTraits changes the settings of a link that differ from want.
func (n *NS) SetTraits(link Link, want Traits) error {
	have := link.Traits
	return fault.Change(fmt.Sprintf("link set %s %+v", link.Name, want), func() error {
		msg := linkHeader(link.Index)
		msg.Change = unix.IFF_NOARP | unix.IFF_MULTICAST | unix.IFF_DYNAMIC
		if want.Dynamic {
			msg.Flags |= unix.IFF_DYNAMIC
		}
		if want.NoARP {
			msg.Flags |= unix.IFF_NOARP
		}
		if !want.NoMulticast {
			msg.Flags |= unix.IFF_MULTICAST
		}
		var attributes []*nl.RtAttr
		if broadcast, err := net.ParseMAC(want.Broadcast); err == nil && have.Broadcast != want.Broadcast {
			attributes = append(attributes, nl.NewRtAttr(unix.IFLA_BROADCAST, broadcast))
		}
		if have.Mode != want.Mode {
			attributes = append(attributes, nl.NewRtAttr(unix.IFLA_LINKMODE, []byte{want.Mode}))
		}
		for _, a := range []struct {
			kind       int
			have, want uint32
		}{{unix.IFLA_GROUP, have.Group, want.Group}, {unix.IFLA_GSO_MAX_SIZE, have.GSOMaxSize, want.GSOMaxSize},
			{unix.IFLA_GSO_MAX_SEGS, have.GSOMaxSegs, want.GSOMaxSegs},
			{unix.IFLA_GRO_MAX_SIZE, have.GROMaxSize, want.GROMaxSize}, {iflaGSOIPv4MaxSize, have.GSOIPv4MaxSize, want.GSOIPv4MaxSize},
			{iflaGROIPv4MaxSize, have.GROIPv4MaxSize, want.GROIPv4MaxSize}} {
			if a.have != a.want {
				attributes = append(attributes, attribute32(a.kind, a.want))
			}
		}
		return n.sendChange(unix.RTM_SETLINK, 0, msg, attributes...)
	})
}

// Attributes of rtnetlink(7) since Linux 6.3 (include/uapi/linux/if_link.h).
const (
	iflaGSOIPv4MaxSize = 63
	iflaGROIPv4MaxSize = 64
)

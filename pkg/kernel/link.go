// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"net"

	mdl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// MaxLearned is the most MACs that a bridge of AddBridge learns (fdb_max_learned, since Linux 6.7): four for each of the 1,024 possible
// ports, in half a MiB of kernel memory, which a pod could otherwise fill with forged MACs. After that, the bridge learns no others and
// floods frames to unknown MACs.
const MaxLearned = 4096

// brFDBMaxLearned is IFLA_BR_FDB_MAX_LEARNED of include/uapi/linux/if_link.h, which package netlink lacks, like nf_call_iptables.
const brFDBMaxLearned = 49

// AddBridge creates a bridge that learns at most MaxLearned MACs. One request makes all settings, so that a killed process never leaves a
// partial bridge. Without a fixed MAC, the bridge would take the lowest of its ports, and udev could change it.
//
// filtered sets nf_call_iptables and nf_call_ip6tables (ip-link(8)), so that IP rules of iptables and nftables see bridged packets while
// br_netfilter is loaded, whatever the sysctl net.bridge.bridge-nf-call-iptables says. vlans enables VLAN filtering. The bridge's device
// group shows that AddBridge made it (Made). It returns unix.EEXIST if the name is taken.
func (n *NS) AddBridge(name string, mac net.HardwareAddr, mtu int, filtered, vlans bool) error {
	op, group, on := "link add "+name+" type bridge", uint32(bridgeGroup), nl.Uint8Attr(1)
	settings := []*nl.RtAttr{attribute32(brFDBMaxLearned, MaxLearned)} // kernels before 6.7 ignore it
	if filtered {
		group = filteredGroup
		settings = append(settings, nl.NewRtAttr(nl.IFLA_BR_NF_CALL_IPTABLES, on), nl.NewRtAttr(nl.IFLA_BR_NF_CALL_IP6TABLES, on))
	}
	if vlans {
		op += " vlan_filtering 1"
		settings = append(settings, nl.NewRtAttr(nl.IFLA_BR_VLAN_FILTERING, on))
	}
	return fault.Change(op, func() error {
		return n.sendChange(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, nl.NewIfInfomsg(unix.AF_UNSPEC),
			append(linkAttrs(name, mac, mtu), attribute32(unix.IFLA_GROUP, group), linkInfo("bridge", settings...))...)
	})
}

// Veth describes a veth pair between the host and a pod.
type Veth struct {
	Host, Pod       string // names of both ends
	HostMAC, PodMAC net.HardwareAddr
	MTU             int       // 0 for the kernel's default
	Netns           Namespace // namespace of the pod side; nil for that of the host side
	Master          int       // ifindex of the bridge for the host side
}

// AddVeth creates a veth pair with both ends down and returns the ifindex of the host side. One request sets names, MACs, MTU, namespace
// and master (rtnetlink(7), RTM_NEWLINK with VETH_INFO_PEER), so that other programs never see a partial pair; package netlink needs three.
// It returns unix.EEXIST if one of the names is taken.
func (n *Node) AddVeth(v Veth) (int, error) {
	var index int
	err := fault.Change(fmt.Sprintf("link add %s type veth peer %s", v.Host, v.Pod), func() error {
		replies, err := n.send(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ECHO|unix.NLM_F_ACK,
			nl.NewIfInfomsg(unix.AF_UNSPEC), v.attributes()...)
		if err == nil && len(replies) > 0 {
			index = int(nl.DeserializeIfInfomsg(replies[0]).Index)
		}
		return err
	})
	if err != nil || index != 0 {
		return index, err
	}
	// Kernels before 6.2 do not return the new link in the reply.
	link, _, err := n.Link(v.Host)
	return link.Index, err
}

func (v Veth) attributes() []*nl.RtAttr {
	peer := nl.NewRtAttr(nl.VETH_INFO_PEER, nil)
	nl.NewIfInfomsgChild(peer, unix.AF_UNSPEC)
	for _, attr := range endAttrs(v.Pod, v.PodMAC, v.MTU) {
		peer.AddChild(attr)
	}
	if v.Netns != nil {
		peer.AddChild(attribute32(unix.IFLA_NET_NS_FD, uint32(v.Netns.Fd())))
	}
	list := append(endAttrs(v.Host, v.HostMAC, v.MTU), linkInfo("veth", peer))
	if v.Master != 0 {
		list = append(list, attribute32(unix.IFLA_MASTER, uint32(v.Master)))
	}
	return list
}

// endAttrs returns the attributes of one end of a veth pair. It has one queue, because the kernel would make one for each CPU, use one, and
// wait for an RCU grace period to switch the others off (netif_set_real_num_tx_queues).
func endAttrs(name string, mac net.HardwareAddr, mtu int) []*nl.RtAttr {
	return append(linkAttrs(name, mac, mtu), attribute32(unix.IFLA_NUM_TX_QUEUES, 1), attribute32(unix.IFLA_NUM_RX_QUEUES, 1))
}

func linkAttrs(name string, mac net.HardwareAddr, mtu int) []*nl.RtAttr {
	attrs := []*nl.RtAttr{nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name))}
	if mac != nil {
		attrs = append(attrs, nl.NewRtAttr(unix.IFLA_ADDRESS, mac))
	}
	if mtu != 0 {
		attrs = append(attrs, attribute32(unix.IFLA_MTU, uint32(mtu)))
	}
	return attrs
}

func linkHeader(index int) *nl.IfInfomsg {
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(index)
	return msg
}

func bridgeHeader(port Link) *nl.IfInfomsg {
	msg := linkHeader(port.Index)
	msg.Family = unix.AF_BRIDGE
	return msg
}

// Ports returns the names of a bridge's ports, or for Link{} of all links with a master. It reads all links of the namespace, so it is slow
// if there are many.
func (n *NS) Ports(bridge Link) (names []string, err error) {
	links, err := n.allLinks()
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		if master := l.Attrs().MasterIndex; master != 0 && (master == bridge.Index || bridge.Index == 0) {
			names = append(names, l.Attrs().Name)
		}
	}
	return names, nil
}

// SetUp sets a link up.
func (n *NS) SetUp(link Link) error {
	return fault.Change("link set "+link.Name+" up", func() error { return n.h.LinkSetUp(byIndex(link.Index)) })
}

// SetMAC changes the MAC of a link.
func (n *NS) SetMAC(link Link, mac net.HardwareAddr) error {
	return fault.Change(fmt.Sprintf("link set %s address %s", link.Name, mac), func() error {
		return n.h.LinkSetHardwareAddr(byIndex(link.Index), mac)
	})
}

// SetARPNotify sets the sysctl arp_notify of a link, as the reference bridge plugin does: the kernel announces its IPv4 addresses when it
// comes up (Documentation/networking/ip-sysctl.rst), except the first time a new veth does.
func (n *NS) SetARPNotify(link Link) error {
	return fault.Change("link set "+link.Name+" arp_notify 1", func() error {
		return n.sendChange(unix.RTM_SETLINK, 0, linkHeader(link.Index), nested(unix.IFLA_AF_SPEC,
			nested(unix.AF_INET, nested(iflaInetConf, attribute32(confARPNotify, 1)))))
	})
}

// SetDown sets a link down.
func (n *NS) SetDown(link Link) error {
	return fault.Change("link set "+link.Name+" down", func() error { return n.h.LinkSetDown(byIndex(link.Index)) })
}

// PinMTU sets a fixed MTU of a bridge. Otherwise the kernel gives it the smallest MTU of its ports, and below 1280 it loses its IPv6
// addresses. The kernel ignores a request for the current MTU, so PinMTU sets another one first, in the same system call, so that a killed
// process never leaves the bridge with that.
func (n *Node) PinMTU(bridge Link, mtu int) error {
	return fault.Change(fmt.Sprintf("link set %s mtu %d as fixed", bridge.Name, mtu), func() error {
		conn, err := mdl.Dial(unix.NETLINK_ROUTE, nil)
		if err != nil {
			return err
		}
		defer conn.Close()
		var requests []mdl.Message
		for _, value := range []int{mtu ^ 1, mtu} { // not above the maximum, which is odd
			requests = append(requests, mdl.Message{Header: mdl.Header{Type: unix.RTM_SETLINK, Flags: mdl.Request | mdl.Acknowledge},
				Data: append(linkHeader(bridge.Index).Serialize(), attribute32(unix.IFLA_MTU, uint32(value)).Serialize()...)})
		}
		_, err = conn.SendMessages(requests)
		for i := 0; err == nil && i < len(requests); i++ {
			_, err = conn.Receive()
		}
		return err
	})
}

// SetMTU sets the MTU of a link.
func (n *NS) SetMTU(link Link, mtu int) error {
	return fault.Change(fmt.Sprintf("link set %s mtu %d", link.Name, mtu), func() error { return n.h.LinkSetMTU(byIndex(link.Index), mtu) })
}

// SetPromisc enables or disables promiscuous mode.
func (n *NS) SetPromisc(link Link, on bool) error {
	if on {
		return fault.Change("link set "+link.Name+" promisc on", func() error { return n.h.SetPromiscOn(byIndex(link.Index)) })
	}
	return fault.Change("link set "+link.Name+" promisc off", func() error { return n.h.SetPromiscOff(byIndex(link.Index)) })
}

// SetAllMulti makes a link receive all multicast frames, or only those to groups that the namespace has joined.
func (n *NS) SetAllMulti(link Link, on bool) error {
	if on {
		return fault.Change("link set "+link.Name+" allmulticast on", func() error { return n.h.LinkSetAllmulticastOn(byIndex(link.Index)) })
	}
	return fault.Change("link set "+link.Name+" allmulticast off", func() error { return n.h.LinkSetAllmulticastOff(byIndex(link.Index)) })
}

// SetMaster makes a link a port of a bridge.
func (n *NS) SetMaster(link, bridge Link) error {
	return fault.Change("link set "+link.Name+" master "+bridge.Name, func() error {
		return n.h.LinkSetMasterByIndex(byIndex(link.Index), bridge.Index)
	})
}

// DelLink deletes an interface, and with one end of a veth pair the other. It is a no-op if the interface is missing.
func (n *NS) DelLink(name string) error {
	return fault.Change("link del "+name, func() error {
		link, ok, err := n.Link(name)
		if err != nil || !ok {
			return err
		}
		return fault.Ignore(n.h.LinkDel(byIndex(link.Index)), unix.ENODEV)
	})
}

// SetUpLeader sets a link up, sets its alias, and makes it the leader of a new device group, which EnsureIFB adds IFB devices to, in one
// request. DelGroup deletes the group in one request, because the deletion of each device alone takes about 15 ms (synchronize_net).
func (n *Node) SetUpLeader(link Link, alias string) error {
	return fault.Change("link set "+link.Name+" up alias "+alias, func() error {
		msg := linkHeader(link.Index)
		msg.Flags, msg.Change = unix.IFF_UP, unix.IFF_UP
		return n.sendChange(unix.RTM_NEWLINK, 0, msg, attribute32(unix.IFLA_GROUP, groupOf(link.Index)),
			nl.NewRtAttr(unix.IFLA_IFALIAS, nl.NonZeroTerminated(alias)))
	})
}

// DelGroup deletes an interface and the device group that it leads, or what remains of the group. It uses only Name and Index of the link.
// It is a no-op if Index is 0 or nothing is there.
func (n *Node) DelGroup(link Link) error {
	return fault.Change("link del "+link.Name+" and its group", func() error {
		if link.Index == 0 {
			return nil
		}
		err := n.sendChange(unix.RTM_DELLINK, 0, nl.NewIfInfomsg(unix.AF_UNSPEC), attribute32(unix.IFLA_GROUP, groupOf(link.Index)))
		if err := fault.Ignore(err, unix.ENODEV); err != nil {
			return err
		}
		if link.Kind == "" || link.LeadsGroup() {
			return nil
		}
		return fault.Ignore(n.h.LinkDel(byIndex(link.Index)), unix.ENODEV)
	})
}

func byIndex(index int) netlink.Link {
	return &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
}

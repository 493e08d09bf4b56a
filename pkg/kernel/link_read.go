// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Link is the kernel's description of a network interface.
type Link struct {
	Index  int
	Name   string
	Kind   string // "veth", "bridge", "ifb", ...
	MAC    net.HardwareAddr
	MTU    int
	Up     bool
	Runs   bool // frames pass: it is up, and the kernel has seen its carrier (IF_OPER_UP of RFC 2863)
	Promis bool
	Master int // ifindex of the bridge, or 0
	Peer   int // ifindex of the other end in its namespace, or 0: only a hint, PeerOf is evidence
	// PeerNetns is the ID of the peer's namespace (ip-netns(8)), or -1 if it is the same.
	PeerNetns int
	Port      BridgePort
	PortState PortState
	Reserved  bool // the port is set as by SetReserved, or the kernel does not report that (before 4.15)
	// AllMulti is true only if a program enabled it, whereas Promis is also true for every bridge port.
	AllMulti bool
	AltNames []string // in the order of ip(8)
	Alias    string   // free text
	TxQueue  int      // maximum packets in the transmit queue, for queues without their own limit
	Traits   Traits
	XDP      uint32           // how an XDP program is attached (XDP_ATTACHED_* in include/uapi/linux/if_link.h), 0 for none
	PermMAC  net.HardwareAddr // permanent MAC of the device; nil if it has none, and for VFs with some drivers
	Device   string           // its device, such as a PCI address (since Linux 5.14); a veth has none
	conf6    []byte           // IPv6 settings, 4 bytes each
	// Forwards4 and Forwards6 report whether the link forwards received packets. They are the IPv4 setting "forwarding" and the IPv6
	// setting force_forwarding (since Linux 6.17) of the link. NS.Forwards returns the IPv6 setting for all links.
	Forwards4, Forwards6 bool

	IgnoresARP bool // its arp_ignore is 8: it answers no ARP request

	// Filtered is a bridge's nf_call_iptables and nf_call_ip6tables (ip-link(8)): iptables and nftables see bridged packets while
	// br_netfilter is loaded.
	Filtered bool
	// set only for a bridge
	FiltersVLANs bool
	DefaultVLAN  uint16 // VLAN of a new port, or 0
	STP          bool   // the bridge runs the spanning tree protocol, which sets the state of its ports
	NoAgeing     bool   // its ageing_time is 0: it forgets each MAC at once and sends all frames to all ports
}

// Traits are settings of ip-link(8) that a link keeps when it moves to another namespace.
type Traits struct {
	NoARP       bool   `json:"noARP,omitempty"`
	NoMulticast bool   `json:"noMulticast,omitempty"`
	Dynamic     bool   `json:"dynamic,omitempty"`
	Broadcast   string `json:"broadcast,omitempty"` // broadcast MAC, formatted as net.HardwareAddr
	Mode        uint8  `json:"mode,omitempty"`      // 0, or 1 for dormant
	Group       uint32 `json:"group,omitempty"`
	// MaxSize is in bytes, MaxSegs in segments.
	GSOMaxSize     uint32 `json:"gsoMaxSize,omitempty"`
	GSOMaxSegs     uint32 `json:"gsoMaxSegs,omitempty"`
	GROMaxSize     uint32 `json:"groMaxSize,omitempty"`
	GSOIPv4MaxSize uint32 `json:"gsoIPv4MaxSize,omitempty"`
	GROIPv4MaxSize uint32 `json:"groIPv4MaxSize,omitempty"`
}

// Attributes of rtnetlink(7) that the imported packages lack (include/uapi/linux/if_link.h, ip.h).
const (
	iflaInetConf    = 1
	iflaInet6Conf   = 2
	confForwarding4 = 1  // IPV4_DEVCONF_FORWARDING
	confARPIgnore   = 19 // IPV4_DEVCONF_ARP_IGNORE
	confARPNotify   = 22 // IPV4_DEVCONF_ARP_NOTIFY
)

// conf6 is the index of each IPv6 setting of a link (DEVCONF_* in include/uapi/linux/ipv6.h).
var conf6 = map[string]int{"accept_ra": 3, "accept_redirects": 4, "disable_ipv6": 26, "accept_dad": 27, "keep_addr_on_down": 42,
	"enhanced_dad": 46, "addr_gen_mode": 47, "force_forwarding": 59}

// groupBase is the first device group of SetUpLeader. It is large, because admins usually take small numbers.
const groupBase = 0x4000_0000

// bridgeGroup and filteredGroup, which SetUpLeader never uses, are the groups of AddBridge without and with iptables for bridged packets.
const bridgeGroup, filteredGroup = groupBase - 1, groupBase - 2

// Made reports whether AddBridge made the bridge.
func (l Link) Made() bool { return l.Traits.Group == bridgeGroup || l.MadeFiltered() }

// MadeFiltered reports whether AddBridge made the bridge with iptables rules for bridged packets.
func (l Link) MadeFiltered() bool { return l.Traits.Group == filteredGroup }

// groupOf returns the device group that the link with the given ifindex leads.
func groupOf(index int) uint32 { return groupBase | uint32(index) }

// LeadsGroup reports whether SetUpLeader has made the link the leader of a device group, with which DelGroup deletes it.
func (l Link) LeadsGroup() bool { return l.Traits.Group == groupOf(l.Index) }

// Lacks returns the settings, all below ipv6/conf/<name of the link>/, whose value differed or was unknown when the link was read.
func (l Link) Lacks(settings ...Sysctl) (lacks []Sysctl) {
	for _, s := range settings {
		if value, known := l.Conf6(strings.TrimPrefix(s.Path, "ipv6/conf/"+l.Name+"/")); !known || fmt.Sprint(value) != s.Value {
			lacks = append(lacks, s)
		}
	}
	return lacks
}

// Conf6 returns the value of a setting below ipv6/conf/<name of the link>/ when the link was read. known is false if it was not reported.
func (l Link) Conf6(setting string) (value int32, known bool) {
	at, known := conf6[setting]
	if known = known && len(l.conf6) >= 4*(at+1); known {
		value = int32(binary.NativeEndian.Uint32(l.conf6[4*at:]))
	}
	return value, known
}

// Link returns an interface by name. ok is false if it does not exist.
func (n *NS) Link(name string) (link Link, ok bool, err error) {
	return n.link(nl.NewIfInfomsg(unix.AF_UNSPEC), nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
}

// LinkByIndex returns an interface by ifindex. ok is false if it does not exist.
func (n *NS) LinkByIndex(index int) (link Link, ok bool, err error) {
	if index == 0 {
		return Link{}, false, nil
	}
	return n.link(linkHeader(index))
}

// pollPause is the polling interval for state that changes without a notification.
const pollPause = 200 * time.Microsecond

// AwaitCarrier waits until the link has a carrier (Link.Runs) or is deleted, or until the deadline. After a link comes up, a kernel work
// item activates its queue and its bridge port up to a second later (net/core/link_watch.c), and frames are dropped until then. Since Linux
// 6.7, reading the link makes the kernel do that at once.
func (n *NS) AwaitCarrier(link Link, until time.Time) error {
	for {
		now, ok, err := n.LinkByIndex(link.Index)
		if err != nil || !ok || now.Runs || time.Now().After(until) {
			return err
		}
		time.Sleep(pollPause)
	}
}

// LinkOf returns the network interface of a device, such as the PCI address of a VF. ok is false if the namespace has none. It reads all
// links of the namespace, so it is slow if there are many.
func (n *NS) LinkOf(device string) (link Link, ok bool, err error) {
	replies, err := n.listObjects(unix.RTM_GETLINK, nl.NewIfInfomsg(unix.AF_UNSPEC))
	for _, message := range replies {
		if err == nil && !ok {
			link, err = parseLink(message)
			ok = err == nil && link.Device == device
		}
	}
	if err != nil {
		return Link{}, false, fmt.Errorf("link show: %w", err)
	}
	if !ok {
		return Link{}, false, nil
	}
	return link, true, nil
}

func (n *NS) link(header *nl.IfInfomsg, attributes ...*nl.RtAttr) (link Link, ok bool, err error) {
	message, ok, err := n.readLink(header, attributes...)
	if err != nil || !ok {
		return Link{}, false, err
	}
	if link, err = parseLink(message); err != nil {
		return Link{}, false, fmt.Errorf("link show: %w", err)
	}
	return link, true, nil
}

// readLink returns the kernel's data about one link. Package netlink would also ask for the VFs of a PF, which is slow.
func (n *NS) readLink(header *nl.IfInfomsg, attributes ...*nl.RtAttr) (message []byte, ok bool, err error) {
	replies, err := n.send(unix.RTM_GETLINK, unix.NLM_F_ACK, header, attributes...)
	if errors.Is(err, unix.ENODEV) {
		return nil, false, nil
	}
	if err == nil && len(replies) != 1 {
		err = fmt.Errorf("%d answers", len(replies))
	}
	if err != nil {
		return nil, false, fmt.Errorf("link show: %w", err)
	}
	return replies[0], true, nil
}

func parseLink(message []byte) (Link, error) {
	l, err := netlink.LinkDeserialize(nil, message)
	if err != nil {
		return Link{}, err
	}
	a := l.Attrs()
	link := Link{Index: a.Index, Name: a.Name, Kind: l.Type(), MAC: a.HardwareAddr, MTU: a.MTU, Up: a.Flags&net.FlagUp != 0,
		Runs: a.OperState == netlink.OperUp, Promis: a.Promisc != 0, Master: a.MasterIndex, Peer: a.ParentIndex, PeerNetns: a.NetNsID,
		AllMulti: a.Allmulti != 0, AltNames: a.AltNames, Alias: a.Alias, PermMAC: a.PermHWAddr, Device: a.ParentDev}
	// If a bridge is set up before its first port is added, the kernel reports its state as unknown, although it has a carrier.
	link.Runs = link.Runs || link.Kind == "bridge" && a.OperState == netlink.OperUnknown && a.RawFlags&unix.IFF_LOWER_UP != 0
	link.TxQueue = max(a.TxQLen, 0)
	link.Traits = Traits{NoARP: a.RawFlags&unix.IFF_NOARP != 0, NoMulticast: a.RawFlags&unix.IFF_MULTICAST == 0,
		Dynamic: a.RawFlags&unix.IFF_DYNAMIC != 0, Group: a.Group, GSOMaxSize: a.GSOMaxSize, GSOMaxSegs: a.GSOMaxSegs,
		GROMaxSize: a.GROMaxSize, GSOIPv4MaxSize: a.GSOIPv4MaxSize, GROIPv4MaxSize: a.GROIPv4MaxSize}
	link.Traits.Broadcast = net.HardwareAddr(attributeOf(message[unix.SizeofIfInfomsg:], unix.IFLA_BROADCAST)).String()
	if mode := attributeOf(message[unix.SizeofIfInfomsg:], unix.IFLA_LINKMODE); len(mode) > 0 {
		link.Traits.Mode = mode[0]
	}
	if a.Xdp != nil {
		link.XDP = a.Xdp.AttachMode
	}
	if bridge, ok := l.(*netlink.Bridge); ok && bridge.VlanDefaultPVID != nil {
		link.FiltersVLANs = bridge.VlanFiltering != nil && *bridge.VlanFiltering
		link.DefaultVLAN = *bridge.VlanDefaultPVID
	}
	on := func(value []byte) bool { return len(value) > 0 && value[0] != 0 }
	body := message[unix.SizeofIfInfomsg:]
	if link.Kind == "bridge" {
		settings := attributeAt(body, unix.IFLA_LINKINFO, nl.IFLA_INFO_DATA)
		link.Filtered = on(attributeOf(settings, nl.IFLA_BR_NF_CALL_IPTABLES)) && on(attributeOf(settings, nl.IFLA_BR_NF_CALL_IP6TABLES))
		link.STP = number32(attributeOf(settings, nl.IFLA_BR_STP_STATE)) != 0
		link.NoAgeing = bytes.Equal(attributeOf(settings, nl.IFLA_BR_AGEING_TIME), make([]byte, 4))
	}
	link.conf6 = attributeAt(body, unix.IFLA_AF_SPEC, unix.AF_INET6, iflaInet6Conf)
	if conf4 := attributeAt(body, unix.IFLA_AF_SPEC, unix.AF_INET, iflaInetConf); len(conf4) >= 4*confARPIgnore {
		link.Forwards4 = binary.NativeEndian.Uint32(conf4[4*(confForwarding4-1):]) != 0
		link.IgnoresARP = binary.NativeEndian.Uint32(conf4[4*(confARPIgnore-1):]) == 8
	}
	forced, _ := link.Conf6("force_forwarding")
	link.Forwards6 = forced != 0
	port := attributeAt(body, unix.IFLA_LINKINFO, nl.IFLA_INFO_SLAVE_DATA)
	link.Port, link.PortState = parsePort(port)
	mask := attributeAt(port, nl.IFLA_BRPORT_GROUP_FWD_MASK)
	link.Reserved = port != nil && (len(mask) != 2 || binary.NativeEndian.Uint16(mask) == reservedMask)
	return link, nil
}

// attributeAt returns the value of a nested netlink attribute, or nil. path contains the types from the outermost to the innermost.
func attributeAt(attributes []byte, path ...uint16) []byte {
	for _, kind := range path {
		attributes = attributeOf(attributes, kind)
	}
	return attributes
}

func textAt(attributes []byte, path ...uint16) string {
	return unix.ByteSliceToString(attributeAt(attributes, path...))
}

// attributeOf returns the value of the first netlink attribute of the type, or nil if it is missing.
func attributeOf(attributes []byte, kind uint16) []byte {
	for k, value := range attributesIn(attributes) {
		if k == kind {
			return value
		}
	}
	return nil
}

// attributesIn returns the type and the value of each complete netlink attribute.
func attributesIn(attributes []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(attributes) >= unix.SizeofRtAttr {
			length := int(binary.NativeEndian.Uint16(attributes))
			if length < unix.SizeofRtAttr || length > len(attributes) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(attributes[2:])&nl.NLA_TYPE_MASK, attributes[unix.SizeofRtAttr:length]) {
				return
			}
			attributes = attributes[min((length+3)&^3, len(attributes)):]
		}
	}
}

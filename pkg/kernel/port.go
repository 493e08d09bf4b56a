// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// BridgePort is the flags of a bridge port. The zero value is the kernel's default for a new one.
type BridgePort struct {
	Hairpin  bool // a frame may leave by the port on which it arrived
	Isolated bool // no frames pass between isolated ports
	Locked   bool // accepts only frames from a MAC that the bridge knows
	// the bridge sends no frames for unknown MACs, no multicast or no broadcast frames through the port
	NoFlood, NoMulticastFlood, NoBroadcastFlood bool
	NoLearning                                  bool // the bridge sends frames for the port's MACs to all ports
}

// PortState is the state of a bridge port (BR_STATE_* in include/uapi/linux/if_bridge.h).
type PortState uint8

// PortForwarding is the only state in which a port forwards frames.
const PortForwarding PortState = 3

// String returns the state's name in bridge-link(8).
func (s PortState) String() string {
	if names := []string{"disabled", "listening", "learning", "forwarding", "blocking"}; int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprint(uint8(s))
}

// portFlag is a flag of a bridge port: its name in bridge-link(8), netlink attribute and value.
type portFlag struct {
	name      string
	attribute int
	on        bool
}

func (p BridgePort) flags() []portFlag {
	return []portFlag{{"hairpin", nl.IFLA_BRPORT_MODE, p.Hairpin}, {"isolated", nl.IFLA_BRPORT_ISOLATED, p.Isolated},
		{"locked", nl.IFLA_BRPORT_LOCKED, p.Locked}, {"flood", nl.IFLA_BRPORT_UNICAST_FLOOD, !p.NoFlood},
		{"mcast_flood", nl.IFLA_BRPORT_MCAST_FLOOD, !p.NoMulticastFlood}, {"bcast_flood", nl.IFLA_BRPORT_BCAST_FLOOD, !p.NoBroadcastFlood},
		{"learning", nl.IFLA_BRPORT_LEARNING, !p.NoLearning}}
}

// Unlike returns the flags that differ from those of other, with their values in p, for example "hairpin true", or "".
func (p BridgePort) Unlike(other BridgePort) string {
	var words []string
	for i, flag := range p.flags() {
		if flag.on != other.flags()[i].on {
			words = append(words, fmt.Sprintf("%s %t", flag.name, flag.on))
		}
	}
	return strings.Join(words, ", ")
}

// parsePort parses the netlink attributes of a bridge port. A flag that the kernel does not report has its default value.
func parsePort(attributes []byte) (p BridgePort, state PortState) {
	is := func(attribute, value byte) bool {
		got := attributeAt(attributes, uint16(attribute))
		return len(got) > 0 && got[0] == value
	}
	if got := attributeAt(attributes, nl.IFLA_BRPORT_STATE); len(got) > 0 {
		state = PortState(got[0])
	}
	return BridgePort{Hairpin: is(nl.IFLA_BRPORT_MODE, 1), Isolated: is(nl.IFLA_BRPORT_ISOLATED, 1), Locked: is(nl.IFLA_BRPORT_LOCKED, 1),
		NoFlood: is(nl.IFLA_BRPORT_UNICAST_FLOOD, 0), NoMulticastFlood: is(nl.IFLA_BRPORT_MCAST_FLOOD, 0),
		NoBroadcastFlood: is(nl.IFLA_BRPORT_BCAST_FLOOD, 0), NoLearning: is(nl.IFLA_BRPORT_LEARNING, 0)}, state
}

// SetPort changes the flags of a bridge port to want, in one request. It is a no-op if they are equal. Package netlink sends one request
// for each flag, and lacks IFLA_BRPORT_LOCKED.
func (n *NS) SetPort(port Link, want BridgePort) error {
	change := want.Unlike(port.Port)
	if change == "" {
		return nil
	}
	return fault.Change("bridge link set "+port.Name+" "+change, func() error {
		info := nl.NewRtAttr(unix.IFLA_PROTINFO|unix.NLA_F_NESTED, nil)
		for i, flag := range want.flags() {
			if flag.on != port.Port.flags()[i].on {
				info.AddRtAttr(flag.attribute, switched(flag.on))
			}
		}
		return n.sendChange(unix.RTM_SETLINK, 0, bridgeHeader(port), info)
	})
}

func switched(on bool) []byte {
	if on {
		return nl.Uint8Attr(1)
	}
	return nl.Uint8Attr(0)
}

// reservedMask has one bit for each address from 01:80:c2:00:00:00 to 0f, except that of pause frames, which a bridge always drops.
const reservedMask = 0xfffd

// SetReserved makes a bridge port treat frames to reserved group addresses, such as LLDP, like ordinary ones (group_fwd_mask in ip-link(8),
// which kernels before 4.15 ignore). By default the port device itself receives them: the bridge learns their source MAC, but its rules do
// not see them.
func (n *NS) SetReserved(link Link) error { return n.setGroupForward(link, reservedMask) }

// ResetReserved restores the default group_fwd_mask of a bridge port.
func (n *NS) ResetReserved(link Link) error { return n.setGroupForward(link, 0) }

func (n *NS) setGroupForward(link Link, mask uint16) error {
	return fault.Change(fmt.Sprintf("bridge link set %s group_fwd_mask %#x", link.Name, mask), func() error {
		return n.h.LinkSetBRSlaveGroupFwdMask(byIndex(link.Index), mask)
	})
}

// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// VF is a PF's settings for one VF, with the names and values of ip-link(8).
type VF struct {
	MAC  net.HardwareAddr `json:"mac,omitempty"`  // set on the PF; else zeros, or with some drivers the VF's own MAC
	VLAN int              `json:"vlan,omitempty"` // 0 for none
	QoS  int              `json:"qos,omitempty"`
	// Proto is "802.1q" (also if empty) or "802.1ad". LinkState is "auto" (also if empty), "enable" or "disable".
	Proto     string `json:"proto,omitempty"`
	LinkState string `json:"linkState,omitempty"`
	// nil if the driver does not report them
	SpoofCheck *bool `json:"spoofCheck,omitempty"`
	Trust      *bool `json:"trust,omitempty"`
	MinRate    int   `json:"minRate,omitempty"` // Mbit/s, 0 for no limit
	MaxRate    int   `json:"maxRate,omitempty"`
}

// VFStats is what a PF has counted for a VF since it was created (IFLA_VF_STATS).
type VFStats struct {
	RxBytes, TxBytes     uint64
	RxPackets, TxPackets uint64
	RxDropped, TxDropped uint64
}

// Flags of IFLA_EXT_MASK (RTEXT_FILTER_* in include/uapi/linux/rtnetlink.h), which select extra data in a reply about a link.
const (
	withVFs      = 1 << 0
	withoutStats = 1 << 3
)

var (
	vlanProtos = map[string]int{"802.1q": unix.ETH_P_8021Q, "802.1ad": unix.ETH_P_8021AD}
	linkStates = []string{unix.IFLA_VF_LINK_STATE_AUTO: "auto", unix.IFLA_VF_LINK_STATE_ENABLE: "enable",
		unix.IFLA_VF_LINK_STATE_DISABLE: "disable"}
)

// VF returns a PF's settings for the VF with the index, which may be in any namespace and bound to any driver. ok is false if there is
// none. Each time the kernel asks the driver about all VFs, which takes milliseconds with some drivers.
func (n *NS) VF(pf Link, index int) (vf VF, ok bool, err error) {
	// The list of all VFs must fit into 64 KiB. With their counters, which package netlink always requests, it would be twice as long.
	message, ok, err := n.readLink(linkHeader(pf.Index), nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(withVFs|withoutStats)))
	if err != nil || !ok {
		return VF{}, false, err
	}
	for i, attributes := range vfsIn(message) {
		if i == index {
			vf, err = parseVF(attributes, len(attributeOf(message[unix.SizeofIfInfomsg:], unix.IFLA_ADDRESS)))
			return vf, err == nil, err
		}
	}
	return VF{}, false, nil
}

// VFStatsOf returns the counters of all VFs of a PF by index. Only the PF must be in the caller's namespace; VFs may have any driver.
func VFStatsOf(pf string) (stats map[int]VFStats, err error) {
	n, err := Host()
	if err != nil {
		return nil, err
	}
	defer n.Close()
	message, ok, err := n.readLink(nl.NewIfInfomsg(unix.AF_UNSPEC), nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(pf)),
		nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(withVFs)))
	if err == nil && !ok {
		err = fmt.Errorf("link show %s: %w", pf, unix.ENODEV)
	}
	if err != nil {
		return nil, err
	}
	stats = map[int]VFStats{}
	for i, attributes := range vfsIn(message) {
		stats[i] = parseVFStats(attributeOf(attributes, unix.IFLA_VF_STATS))
	}
	return stats, nil
}

// vfsIn yields the index and the attributes of each VF in a message about a PF. It skips a VF about which the driver reports nothing.
func vfsIn(message []byte) iter.Seq2[int, []byte] {
	return func(yield func(int, []byte) bool) {
		for kind, vf := range attributesIn(attributeOf(message[unix.SizeofIfInfomsg:], unix.IFLA_VFINFO_LIST)) {
			if words := uint32s(attributeOf(vf, unix.IFLA_VF_MAC)); kind == unix.IFLA_VF_INFO && len(words) > 0 && !yield(int(words[0]), vf) {
				return
			}
		}
	}
}

// parseVF parses the attributes of a VF, each of which begins with its index. addressLen is the length of the PF's MAC.
func parseVF(attributes []byte, addressLen int) (VF, error) {
	mac, vlan, rate := attributeOf(attributes, unix.IFLA_VF_MAC), uint32s(attributeOf(attributes, unix.IFLA_VF_VLAN)),
		uint32s(attributeOf(attributes, unix.IFLA_VF_RATE))
	if len(mac) < 4+addressLen || len(vlan) < 3 || len(rate) < 3 {
		return VF{}, errors.New("link show: the kernel reports a VF without its address, VLAN or rate")
	}
	vf := VF{MAC: slices.Clone(mac[4 : 4+addressLen]), VLAN: int(vlan[1]), QoS: int(vlan[2]), Proto: "802.1q", MinRate: int(rate[1]),
		MaxRate: int(rate[2])}
	if info := attributeAt(attributes, unix.IFLA_VF_VLAN_LIST, unix.IFLA_VF_VLAN_INFO); len(info) >= 14 &&
		binary.BigEndian.Uint16(info[12:]) == unix.ETH_P_8021AD {
		vf.Proto = "802.1ad"
	}
	vf.LinkState = linkStates[0]
	if state := uint32s(attributeOf(attributes, unix.IFLA_VF_LINK_STATE)); len(state) > 1 && int(state[1]) < len(linkStates) {
		vf.LinkState = linkStates[state[1]]
	}
	vf.SpoofCheck = optionalSetting(attributeOf(attributes, unix.IFLA_VF_SPOOFCHK))
	vf.Trust = optionalSetting(attributeOf(attributes, unix.IFLA_VF_TRUST))
	return vf, nil
}

// optionalSetting returns the value of a setting, or nil if the driver does not report it: then the kernel sends no value or -1.
func optionalSetting(value []byte) *bool {
	words := uint32s(value)
	if len(words) < 2 || words[1] == ^uint32(0) {
		return nil
	}
	on := words[1] != 0
	return &on
}

func parseVFStats(attributes []byte) VFStats {
	count := func(kind uint16) uint64 {
		if value := attributeOf(attributes, kind); len(value) == 8 {
			return binary.NativeEndian.Uint64(value)
		}
		return 0
	}
	return VFStats{count(unix.IFLA_VF_STATS_RX_BYTES), count(unix.IFLA_VF_STATS_TX_BYTES), count(unix.IFLA_VF_STATS_RX_PACKETS),
		count(unix.IFLA_VF_STATS_TX_PACKETS), count(unix.IFLA_VF_STATS_RX_DROPPED), count(unix.IFLA_VF_STATS_TX_DROPPED)}
}

// uint32s splits a value into 32-bit numbers, and ignores an incomplete one at the end.
func uint32s(value []byte) (words []uint32) {
	for ; len(value) >= 4; value = value[4:] {
		words = append(words, binary.NativeEndian.Uint32(value))
	}
	return words
}

// SetVF changes the PF's settings for a VF from have to want, where nil means no change. It sends one request for each setting that
// differs, because a driver may refuse even the current value of a setting. It joins a VFError for each setting that the driver refused;
// the other requests are sent nevertheless. To restore the old settings after an error, a caller must first read the current ones with VF.
//
// Drivers refuse unsupported settings with EOPNOTSUPP, EPROTONOSUPPORT or EINVAL. EINVAL may also mean a bad value, such as a rate above
// the link's speed, or any rate while the PF has no carrier. A new MAC takes effect the next time a driver is bound to the VF. While the PF
// stores a MAC for it, a VF may change its own only if it is trusted. A zero MAC deletes the one that the PF stores.
func (n *NS) SetVF(pf Link, index int, have, want VF) error {
	want.Proto, want.LinkState = cmp.Or(want.Proto, "802.1q"), cmp.Or(want.LinkState, linkStates[0])
	link, former, wanted := byIndex(pf.Index), have.settings(), want.settings()
	var errs []error
	for i, set := range []func() error{
		func() error { return n.h.LinkSetVfHardwareAddr(link, index, want.MAC) },
		func() error {
			return n.h.LinkSetVfVlanQosProto(link, index, want.VLAN, want.QoS, vlanProtos[want.Proto])
		},
		func() error { return n.h.LinkSetVfSpoofchk(link, index, *want.SpoofCheck) },
		func() error { return n.h.LinkSetVfTrust(link, index, *want.Trust) },
		func() error { return n.h.LinkSetVfRate(link, index, want.MinRate, want.MaxRate) },
		func() error { return n.h.LinkSetVfState(link, index, uint32(slices.Index(linkStates, want.LinkState))) },
	} {
		if wanted[i] != "" && wanted[i] != former[i] {
			op := fmt.Sprintf("link set %s vf %d %s", pf.Name, index, wanted[i])
			if err := fault.Change(op, set); err != nil {
				errs = append(errs, &VFError{wanted[i], err})
			}
		}
	}
	return errors.Join(errs...)
}

// VFError is the refusal of one of a VF's settings by the driver of its PF.
type VFError struct {
	Setting string // with its value, as in "ip link set … vf"
	Err     error
}

func (e *VFError) Error() string { return e.Err.Error() }

// Unwrap returns the error of the kernel.
func (e *VFError) Unwrap() error { return e.Err }

// settings returns the arguments of "ip link set … vf" in the order of SetVF, or "" for a setting that must not change.
func (v VF) settings() []string {
	mac := ""
	if v.MAC != nil {
		mac = "mac " + v.MAC.String()
	}
	return []string{mac, fmt.Sprintf("vlan %d qos %d proto %s", v.VLAN, v.QoS, cmp.Or(v.Proto, "802.1q")), onOff("spoofchk", v.SpoofCheck),
		onOff("trust", v.Trust), fmt.Sprintf("min_tx_rate %d max_tx_rate %d", v.MinRate, v.MaxRate),
		"state " + cmp.Or(v.LinkState, linkStates[0])}
}

func onOff(name string, on *bool) string {
	switch {
	case on == nil:
		return ""
	case *on:
		return name + " on"
	}
	return name + " off"
}

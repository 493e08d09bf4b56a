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

// VF holds a PF's settings for one of its VFs, in the words of ip-link(8).
type VF struct {
	MAC  net.HardwareAddr `json:"mac,omitempty"`  // set on the PF; else zeros, or with some drivers the VF's own MAC
	VLAN int              `json:"vlan,omitempty"` // 0 for none
	QoS  int              `json:"qos,omitempty"`
	// Proto is "802.1q" or "802.1ad". LinkState is "auto", "enable" or "disable". Empty stands for the first value.
	Proto     string `json:"proto,omitempty"`
	LinkState string `json:"linkState,omitempty"`
	// nil if the driver does not report it.
	SpoofCheck *bool `json:"spoofCheck,omitempty"`
	Trust      *bool `json:"trust,omitempty"`
	MinRate    int   `json:"minRate,omitempty"` // Mbit/s, 0 for no limit
	MaxRate    int   `json:"maxRate,omitempty"`
}

// VFStats counts the traffic of a VF since it was created, as its PF reports it (IFLA_VF_STATS).
type VFStats struct {
	RxBytes, TxBytes     uint64
	RxPackets, TxPackets uint64
	RxDropped, TxDropped uint64
}

// Extra data that a request for a link asks for (RTEXT_FILTER_* in include/uapi/linux/rtnetlink.h).
const (
	withVFs      = 1 << 0
	withoutStats = 1 << 3
)

var (
	vlanProtos = map[string]uint16{"802.1q": unix.ETH_P_8021Q, "802.1ad": unix.ETH_P_8021AD}
	linkStates = []string{unix.IFLA_VF_LINK_STATE_AUTO: "auto", unix.IFLA_VF_LINK_STATE_ENABLE: "enable",
		unix.IFLA_VF_LINK_STATE_DISABLE: "disable"}
)

// VF returns a PF's settings for the VF with an index. It works for VFs in any namespace and with any driver. ok is false if the PF has no
// such VF. The kernel queries the driver about all VFs, which takes milliseconds with some drivers.
func (n *NS) VF(pf Link, index int) (vf VF, ok bool, err error) {
	// Without counters: they are half of the answer, and the list of all VFs must fit into 64 KiB.
	message, ok, err := n.readLink(linkHeader(pf.Index), nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(withVFs|withoutStats)))
	if err != nil || !ok {
		return VF{}, false, err
	}
	for i, attributes := range vfsIn(message) {
		if i == index {
			vf, err = parseVF(attributes, len(attribute(message[unix.SizeofIfInfomsg:], unix.IFLA_ADDRESS)))
			return vf, err == nil, err
		}
	}
	return VF{}, false, nil
}

// VFStatsOf returns the counters of all VFs of a PF in this network namespace, by index. It works for VFs in any namespace and with any
// driver.
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
		stats[i] = parseVFStats(attribute(attributes, unix.IFLA_VF_STATS))
	}
	return stats, nil
}

// vfsIn returns the index and attributes of each VF in a message about its PF. It skips VFs about which the driver reports nothing.
func vfsIn(message []byte) iter.Seq2[int, []byte] {
	return func(yield func(int, []byte) bool) {
		for kind, vf := range attributesIn(attribute(message[unix.SizeofIfInfomsg:], unix.IFLA_VFINFO_LIST)) {
			if words := uint32s(attribute(vf, unix.IFLA_VF_MAC)); kind == unix.IFLA_VF_INFO && len(words) > 0 && !yield(int(words[0]), vf) {
				return
			}
		}
	}
}

// parseVF parses the attributes of a VF. addressLen is the length of the PF's MAC. Each attribute begins with the VF's index.
func parseVF(attributes []byte, addressLen int) (VF, error) {
	mac, vlan, rate := attribute(attributes, unix.IFLA_VF_MAC), uint32s(attribute(attributes, unix.IFLA_VF_VLAN)),
		uint32s(attribute(attributes, unix.IFLA_VF_RATE))
	if len(mac) < 4+addressLen || len(vlan) < 3 || len(rate) < 3 {
		return VF{}, errors.New("link show: the kernel reports a VF without its address, VLAN or rate")
	}
	vf := VF{MAC: slices.Clone(mac[4 : 4+addressLen]), VLAN: int(vlan[1]), QoS: int(vlan[2]), Proto: "802.1q", MinRate: int(rate[1]),
		MaxRate: int(rate[2])}
	if info := nested(attributes, unix.IFLA_VF_VLAN_LIST, unix.IFLA_VF_VLAN_INFO); len(info) >= 14 &&
		binary.BigEndian.Uint16(info[12:]) == vlanProtos["802.1ad"] {
		vf.Proto = "802.1ad"
	}
	vf.LinkState = linkStates[0]
	if state := uint32s(attribute(attributes, unix.IFLA_VF_LINK_STATE)); len(state) > 1 && int(state[1]) < len(linkStates) {
		vf.LinkState = linkStates[state[1]]
	}
	vf.SpoofCheck = optionalSetting(attribute(attributes, unix.IFLA_VF_SPOOFCHK))
	vf.Trust = optionalSetting(attribute(attributes, unix.IFLA_VF_TRUST))
	return vf, nil
}

// optionalSetting returns a setting that a driver may not report; the value is then -1.
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
		if value := attribute(attributes, kind); len(value) == 8 {
			return binary.NativeEndian.Uint64(value)
		}
		return 0
	}
	return VFStats{count(unix.IFLA_VF_STATS_RX_BYTES), count(unix.IFLA_VF_STATS_TX_BYTES), count(unix.IFLA_VF_STATS_RX_PACKETS),
		count(unix.IFLA_VF_STATS_TX_PACKETS), count(unix.IFLA_VF_STATS_RX_DROPPED), count(unix.IFLA_VF_STATS_TX_DROPPED)}
}

// uint32s returns the complete words of a value.
func uint32s(value []byte) (words []uint32) {
	for ; len(value) >= 4; value = value[4:] {
		words = append(words, binary.NativeEndian.Uint32(value))
	}
	return words
}

// SetVF changes the PF's settings for a VF from have to want. It sends only settings that differ, because drivers refuse even their current
// values. Each request changes one setting. After a failure SetVF continues; it joins the errors, and each names its setting. It does not
// change settings that are nil in want. To undo it after an error, read the VF again and restore from that.
//
// Drivers refuse unsupported settings with EOPNOTSUPP, EPROTONOSUPPORT (see Unsupported) or EINVAL. EINVAL may also mean a bad value, such
// as a rate above the link's speed, or any rate while the PF has no carrier. A new MAC takes effect when the VF's driver is bound next;
// from then on only a trusted VF may change it. A zero MAC resets it, also if the previous MAC was the VF's own.
func (n *NS) SetVF(pf Link, index int, have, want VF) error {
	var errs []error
	former := have.settings(index)
	for i, s := range want.settings(index) {
		if s.words != "" && s.words != former[i].words {
			op := fmt.Sprintf("link set %s vf %d %s", pf.Name, index, s.words)
			errs = append(errs, fault.Change(op, func() error { return n.setVF(pf, s.attribute) }))
		}
	}
	return errors.Join(errs...)
}

func (n *NS) setVF(pf Link, attribute *nl.RtAttr) error {
	if attribute == nil {
		return unix.EINVAL
	}
	req := n.request(unix.RTM_SETLINK, 0)
	req.AddData(linkHeader(pf.Index))
	list := nl.NewRtAttr(unix.IFLA_VFINFO_LIST, nil)
	list.AddRtAttr(unix.IFLA_VF_INFO, nil).AddChild(attribute)
	req.AddData(list)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// Unsupported reports whether an error of SetVF means that the driver does not know the setting.
func Unsupported(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT)
}

// vfSetting is the content of one request. words describe the setting as ip-link(8) does, and are empty for none. The attribute is nil if
// the words have none.
type vfSetting struct {
	words     string
	attribute *nl.RtAttr
}

// settings returns all settings of a VF, always in the same order.
func (v VF) settings(index int) []vfSetting {
	list := []vfSetting{{}, v.vlan(index), onOff("spoofchk", unix.IFLA_VF_SPOOFCHK, index, v.SpoofCheck),
		onOff("trust", unix.IFLA_VF_TRUST, index, v.Trust),
		{fmt.Sprintf("min_tx_rate %d max_tx_rate %d", v.MinRate, v.MaxRate), words(unix.IFLA_VF_RATE, index, v.MinRate, v.MaxRate)}, {}}
	if v.MAC != nil {
		mac := words(unix.IFLA_VF_MAC, index)
		mac.Data = append(mac.Data, append(v.MAC[:len(v.MAC):len(v.MAC)], make([]byte, max(0, 32-len(v.MAC)))...)...) // MAX_ADDR_LEN
		list[0] = vfSetting{"mac " + v.MAC.String(), mac}
	}
	state := cmp.Or(v.LinkState, linkStates[0])
	list[5].words = "state " + state
	if i := slices.Index(linkStates, state); i >= 0 {
		list[5].attribute = words(unix.IFLA_VF_LINK_STATE, index, i)
	}
	return list
}

func (v VF) vlan(index int) vfSetting {
	name := cmp.Or(v.Proto, "802.1q")
	s := vfSetting{words: fmt.Sprintf("vlan %d qos %d proto %s", v.VLAN, v.QoS, name)}
	if proto := vlanProtos[name]; proto != 0 {
		info := words(unix.IFLA_VF_VLAN_INFO, index, v.VLAN, v.QoS, 0)
		binary.BigEndian.PutUint16(info.Data[12:], proto)
		s.attribute = nl.NewRtAttr(unix.IFLA_VF_VLAN_LIST, nil)
		s.attribute.AddChild(info)
	}
	return s
}

func onOff(name string, kind, index int, on *bool) vfSetting {
	switch {
	case on == nil:
		return vfSetting{}
	case *on:
		return vfSetting{name + " on", words(kind, index, 1)}
	}
	return vfSetting{name + " off", words(kind, index, 0)}
}

// words returns an attribute of 32-bit words.
func words(kind int, values ...int) *nl.RtAttr {
	var data []byte
	for _, v := range values {
		data = binary.NativeEndian.AppendUint32(data, uint32(v))
	}
	return nl.NewRtAttr(kind, data)
}

// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

func wordAttribute(kind int, values ...int) *nl.RtAttr {
	var data []byte
	for _, v := range values {
		data = binary.NativeEndian.AppendUint32(data, uint32(v))
	}
	return nl.NewRtAttr(kind, data)
}

// pfMessage returns the kernel's message about a PF. VF indexes may have gaps, because the kernel omits VFs that the driver does not
// report.
func pfMessage(vfs map[int]VF, mute bool) []byte {
	list := nl.NewRtAttr(unix.IFLA_VFINFO_LIST, nil)
	for _, index := range slices.Sorted(maps.Keys(vfs)) {
		v := vfs[index]
		info := list.AddRtAttr(unix.IFLA_VF_INFO, nil)
		address := nl.VfMac{Vf: uint32(index)}
		copy(address.Mac[:], v.MAC)
		info.AddRtAttr(unix.IFLA_VF_MAC, address.Serialize())
		info.AddChild(wordAttribute(unix.IFLA_VF_VLAN, index, v.VLAN, v.QoS))
		tag := wordAttribute(unix.IFLA_VF_VLAN_INFO, index, v.VLAN, v.QoS, 0)
		binary.BigEndian.PutUint16(tag.Data[12:], uint16(vlanProtos[v.Proto]))
		info.AddChild(nested(unix.IFLA_VF_VLAN_LIST, tag))
		info.AddChild(wordAttribute(unix.IFLA_VF_RATE, index, v.MinRate, v.MaxRate))
		info.AddChild(wordAttribute(unix.IFLA_VF_LINK_STATE, index, slices.Index(linkStates, v.LinkState)))
		for kind, on := range map[int]*bool{unix.IFLA_VF_SPOOFCHK: v.SpoofCheck, unix.IFLA_VF_TRUST: v.Trust} {
			value := -1
			if on != nil {
				value = int(switched(*on)[0])
			}
			if on != nil || mute {
				info.AddChild(wordAttribute(kind, index, value))
			}
		}
		stats := info.AddRtAttr(unix.IFLA_VF_STATS, nil)
		for kind := range 9 {
			stats.AddRtAttr(kind, binary.NativeEndian.AppendUint64(nil, uint64(100*index+kind)))
		}
	}
	message := nl.NewIfInfomsg(unix.AF_UNSPEC).Serialize()
	return append(append(message, nl.NewRtAttr(unix.IFLA_ADDRESS, make([]byte, 6)).Serialize()...), list.Serialize()...)
}

// TestParseVF: parseVF returns all settings of a VF, and vfsIn the index from the attributes, not the position in the list.
func TestParseVF(t *testing.T) {
	yes, no := true, false
	for _, mute := range []bool{false, true} {
		want := map[int]VF{
			0: {MAC: mac("00:00:00:00:00:00"), Proto: "802.1q", LinkState: "auto"},
			2: {MAC: mac("02:00:00:00:00:02"), VLAN: 100, QoS: 3, Proto: "802.1ad", LinkState: "disable", MinRate: 10, MaxRate: 100},
		}
		if !mute {
			for i, v := range want {
				v.SpoofCheck, v.Trust = &yes, &no
				want[i] = v
			}
		}
		got, stats := map[int]VF{}, map[int]VFStats{}
		for i, attributes := range vfsIn(pfMessage(want, mute)) {
			vf, err := parseVF(attributes, 6)
			kerneltest.Must(t, err)
			text, err := json.Marshal(vf)
			kerneltest.Must(t, err)
			var read VF
			kerneltest.Must(t, json.Unmarshal(text, &read))
			got[i], stats[i] = read, parseVFStats(attributeOf(attributes, unix.IFLA_VF_STATS))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		wantStats := map[int]VFStats{0: {2, 3, 0, 1, 7, 8}, 2: {202, 203, 200, 201, 207, 208}}
		if diff := cmp.Diff(wantStats, stats); diff != "" {
			t.Error(diff)
		}
	}
}

// TestParseVFShort: parseVF returns an error if a mandatory attribute is missing or too short.
func TestParseVFShort(t *testing.T) {
	full := []*nl.RtAttr{wordAttribute(unix.IFLA_VF_MAC, 0, 1, 2), wordAttribute(unix.IFLA_VF_VLAN, 0, 1, 2),
		wordAttribute(unix.IFLA_VF_RATE, 0, 1, 2)}
	for i, short := range full {
		for lacks := 8; lacks >= 0; lacks -= 4 {
			short.Data = short.Data[:lacks]
			var message []byte
			for _, a := range full {
				message = append(message, a.Serialize()...)
			}
			if vf, err := parseVF(message, 8); err == nil {
				t.Errorf("%d with %d bytes: %+v", i, lacks, vf)
			}
		}
		full[i] = wordAttribute(int(short.Type), 0, 1, 2)
	}
}

// TestSetVFSends: SetVF sends one request for each setting that differs, even after one has failed.
func TestSetVFSends(t *testing.T) {
	w := newWire(t)
	yes, no := true, false
	have := VF{MAC: mac("00:00:00:00:00:00"), SpoofCheck: &yes}
	all := VF{MAC: mac("02:00:00:00:00:01"), VLAN: 100, QoS: 2, Proto: "802.1ad", SpoofCheck: &no, Trust: &yes, LinkState: "enable",
		MinRate: 1, MaxRate: 2}
	const vf = "link set kth0 vf 3 "
	for _, c := range []struct {
		have, want VF
		ops        []string
	}{
		{all, all, nil},
		{have, VF{}, nil},
		{have, VF{MAC: have.MAC, Proto: "802.1q", LinkState: "auto", SpoofCheck: &yes}, nil},
		{have, VF{SpoofCheck: &no}, []string{"spoofchk off"}},
		{have, VF{QoS: 1}, []string{"vlan 0 qos 1 proto 802.1q"}},
		{have, VF{MaxRate: 7}, []string{"min_tx_rate 0 max_tx_rate 7"}},
		{have, all, []string{"mac 02:00:00:00:00:01", "vlan 100 qos 2 proto 802.1ad", "spoofchk off", "trust on", "min_tx_rate 1 max_tx_rate 2",
			"state enable"}},
		{all, have, []string{"mac 00:00:00:00:00:00", "vlan 0 qos 0 proto 802.1q", "spoofchk on", "min_tx_rate 0 max_tx_rate 0", "state auto"}},
	} {
		err := w.host.SetVF(w.hostSide, 3, c.have, c.want)
		var want []error
		for _, op := range c.ops {
			want = append(want, fmt.Errorf("%s%s: %w", vf, op, unix.EOPNOTSUPP)) // a veth has no VFs
		}
		if diff := cmp.Diff(fmt.Sprint(errors.Join(want...)), fmt.Sprint(err)); diff != "" {
			t.Errorf("%+v: %s", c.want, diff)
		}
	}
}

// TestVFNone: a link without VFs and a deleted link have no VF.
func TestVFNone(t *testing.T) {
	w := newWire(t)
	for _, link := range []Link{w.hostSide, {Index: 1 << 20, Name: "gone"}} {
		if vf, ok, err := w.host.VF(link, 0); ok || err != nil || vf.MAC != nil {
			t.Errorf("%s: %+v, %t, %v", link.Name, vf, ok, err)
		}
	}
	if stats, err := VFStatsOf("kth0"); err != nil || len(stats) != 0 {
		t.Errorf("%v, %v", stats, err)
	}
	if _, err := VFStatsOf("gone"); !errors.Is(err, unix.ENODEV) {
		t.Error(err)
	}
}

func FuzzParseVF(f *testing.F) {
	f.Add(pfMessage(map[int]VF{1: {MAC: mac("02:00:00:00:00:02")}}, true), 6)
	f.Add(make([]byte, unix.SizeofIfInfomsg), 0)
	f.Fuzz(func(t *testing.T, message []byte, length int) {
		if len(message) < unix.SizeofIfInfomsg || length < 0 {
			return
		}
		for index, attributes := range vfsIn(message) {
			vf, err := parseVF(attributes, min(length, 32))
			if err != nil {
				continue
			}
			if again, err := parseVF(attributes, min(length, 32)); err != nil || !cmp.Equal(vf, again) {
				t.Errorf("%d: %+v", index, vf)
			}
			_ = parseVFStats(attributes)
		}
	})
}

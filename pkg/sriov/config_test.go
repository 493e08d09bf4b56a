// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/vfconfig"
)

func parse(t testing.TB, prev *types100.Result, keys ...any) (requestConfig, error) {
	t.Helper()
	text, err := json.Marshal(object{"cniVersion": "1.1.0", "name": "net", "type": "sriov", "deviceID": vf0}.With(keys...))
	must(t, err)
	return parseConfig(&plugin.Request{Plugin: "sriov", Verb: "ADD", Config: text, Prev: prev,
		Args: map[string]string{"MAC": "02:00:00:00:00:05"}, Log: slog.New(slog.DiscardHandler)})
}

func TestParseRefused(t *testing.T) {
	for _, c := range []struct {
		says string
		keys []any
	}{
		{"resources[0] \"fast\": want the name", []any{"resources", []any{"fast"}}},
		{"otherResources[0] \"slow\": want the name", []any{"otherResources", []any{"slow"}}},
		{"otherResources[0] \"a/b\": it is also in resources", []any{"resources", []any{"a/b"}, "otherResources", []any{"a/b"}}},
		{"resources[1] \"a/b\": duplicate resource", []any{"resources", []any{"a/b", "a/b"}}},
		{"vlan 4095: want 0-4094", []any{"vlan", 4095}},
		{"vlan -1: want 0-4094", []any{"vlan", -1}},
		{"vlanQoS 8: want 0-7", []any{"vlan", 1, "vlanQoS", 8}},
		{"vlanQoS and vlanProto need a vlan", []any{"vlanQoS", 1}},
		{"vlanQoS and vlanProto need a vlan", []any{"vlan", 0, "vlanProto", "802.1ad"}},
		{`vlanProto "qinq": want`, []any{"vlan", 1, "vlanProto", "qinq"}},
		{`spoofchk "yes": want on or off`, []any{"spoofchk", "yes"}},
		{`trust "true": want on or off`, []any{"trust", "true"}},
		{`link_state "up": want auto`, []any{"link_state", "up"}},
		{"max_tx_rate -1: want Mbit/s", []any{"max_tx_rate", -1}},
		{"min_tx_rate 20: more than max_tx_rate 10", []any{"min_tx_rate", 20, "max_tx_rate", 10}},
		{"mtu 67: want 68-65535", []any{"mtu", 67}},
		{`driver "../x": want the name`, []any{"driver", "../x"}},
		{`mac "ff:ff:ff:ff:ff:ff": want a unicast`, []any{"runtimeConfig", object{"mac": "ff:ff:ff:ff:ff:ff"}}},
		{`mac "00:00:00:00:00:00": want a unicast`, []any{"runtimeConfig", object{"mac": "00:00:00:00:00:00"}}},
		{`ifName "vf": want a name that contains {index}`, []any{"ifName", "vf"}},
		{`ifName "a-very-long-one{index}": `, []any{"ifName", "a-very-long-one{index}"}},
		{`ipam type "sriov": want an IPAM plugin`, []any{"ipam", object{"type": "sriov"}}},
		{`ipam type "../x": want the name`, []any{"ipam", object{"type": "../x"}}},
		{"ipam: set a type", []any{"ipam", object{"subnet": "10.0.0.0/8"}}},
		{`kubeletDir "kubelet": want an absolute path`, []any{"kubeletDir", "kubelet"}},
	} {
		if _, err := parse(t, nil, c.keys...); plugin.Code(err) != plugin.CodeConfig || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v: %v, want %q", c.keys, err, c.says)
		}
	}
}

// TestRates: the pod's egress limit applies to its VF, unless the configuration has a lower one.
func TestRates(t *testing.T) {
	limit := object{"bandwidth": object{"egressRate": 25_500_000}}
	for _, c := range []struct {
		keys []any
		want int
	}{{nil, 25}, {[]any{"max_tx_rate", 10}, 10}, {[]any{"max_tx_rate", 100}, 25}, {[]any{"max_tx_rate", 0}, 25}} {
		cfg, err := parse(t, nil, append(c.keys, "runtimeConfig", limit)...)
		if err != nil || *cfg.Wanted.MaxTxRate != c.want {
			t.Errorf("%v: %+v, %v", c.keys, cfg.Wanted, err)
		}
	}
	if cfg, err := parse(t, &types100.Result{}, "runtimeConfig", limit); err != nil || cfg.Wanted.MaxTxRate != nil || cfg.ReportIPs {
		t.Errorf("chained: %+v, %v", cfg, err)
	}
}

// TestWhichMAC: a MAC from the runtime takes precedence. In a chain, CNI_ARGS apply to the main plugin's interface, not to the VF.
func TestWhichMAC(t *testing.T) {
	runtime := object{"mac": "02:00:00:00:00:06"}
	for _, c := range []struct {
		want string
		prev *types100.Result
		keys []any
	}{
		{"02:00:00:00:00:06", nil, []any{"runtimeConfig", runtime, "mac", "02:00:00:00:00:07"}},
		{"02:00:00:00:00:05", nil, []any{"mac", "02:00:00:00:00:07"}},
		{"02:00:00:00:00:07", &types100.Result{}, []any{"mac", "02:00:00:00:00:07"}},
		{"", &types100.Result{}, nil},
	} {
		if cfg, err := parse(t, c.prev, c.keys...); err != nil || cfg.MAC.String() != c.want {
			t.Errorf("%v: %s, %v", c.keys, cfg.MAC, err)
		}
	}
}

// TestApply: settings that are not configured do not change, and a configured VLAN replaces all VLAN settings.
func TestApply(t *testing.T) {
	yes, no := true, false
	was := kernel.VF{MAC: []byte{2, 0, 0, 0, 0, 1}, VLAN: 7, QoS: 3, Proto: "802.1ad", LinkState: "enable", SpoofCheck: &yes, Trust: &yes,
		MinRate: 1, MaxRate: 2}
	if diff := cmp.Diff(was, onPF(vfconfig.Config{}, was)); diff != "" {
		t.Error(diff)
	}
	vlan, rate := 9, 5
	got := onPF(vfconfig.Config{VLAN: &vlan, Trust: "off", LinkState: "auto", MaxTxRate: &rate}, was)
	want := kernel.VF{MAC: was.MAC, VLAN: 9, Proto: "802.1q", LinkState: "auto", SpoofCheck: &yes, Trust: &no, MinRate: 1, MaxRate: 5}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if got := onPF(vfconfig.Config{VLAN: &vlan, VLANProto: "802.1AD"}, was).Proto; got != "802.1ad" {
		t.Errorf("protocol %s", got)
	}
	if equalVF(got, was) || !equalVF(got, want) || !strings.Contains(formatVF(got), "vlan 9 qos 0 proto 802.1q spoofchk on trust off state auto") {
		t.Error(formatVF(got))
	}
}

// TestDeviceErrorsHaveHints: code 103 always says what to do.
func TestDeviceErrorsHaveHints(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(data)) {
			if strings.Contains(line, "Errorf(plugin.CodeDevice,") && !strings.Contains(line, "WithHint(") {
				t.Errorf("%s: no hint: %s", file, line)
			}
		}
	}
}

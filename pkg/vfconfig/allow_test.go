// SPDX-License-Identifier: Apache-2.0

package vfconfig

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/strict"
)

func TestAllowance(t *testing.T) {
	a := DefaultAllowance()
	for _, limit := range []struct {
		key   string
		value any
	}{{"vlan", "100-199, 300"}, {"maxTxRate", json.Number("1000")}, {"minTxRate", json.Number("100")}, {"vlanQoS", json.Number("7")}} {
		if err := a.Limit(limit.key, strict.Value{Data: limit.value}); err != nil {
			t.Error(err)
		}
	}
	const all = "vlan 100-199,300, vlanQoS 0-7, mac, minTxRate 0-100, maxTxRate 1-1000, mtu, ifName, ips"
	if a.String() != all || (Allowance{}).String() != "nothing" {
		t.Errorf("%s", a)
	}
	for _, test := range []struct {
		config *Config
		want   string
	}{
		{nil, ""},
		{&Config{MAC: "02:00:00:00:00:01", IPs: []string{"10.0.0.1"}, IfName: "a", MTU: new(68)}, ""},
		{&Config{VLAN: new(100), MaxTxRate: new(1000), MinTxRate: new(0)}, ""},
		{&Config{VLAN: new(300), MaxTxRate: new(1)}, ""},
		{&Config{VLAN: new(99)}, "vlan 99: claims may set 100-199,300"},
		{&Config{VLAN: new(200)}, "vlan 200: claims may set 100-199,300"},
		{&Config{VLAN: new(0)}, "vlan 0: claims may set 100-199,300"},
		{&Config{MaxTxRate: new(1001)}, "maxTxRate 1001: claims may set 1-1000"},
		{&Config{MaxTxRate: new(0)}, "maxTxRate 0: claims may set 1-1000"}, // no limit
		{&Config{MTU: new(1400), Trust: "on"}, `trust "on": claims may not set it; they may set: ` + all},
		{&Config{Rebind: new(false)}, `rebind false: claims may not set it; they may set: ` + all},
	} {
		if err := a.Check(test.config); err == nil && test.want != "" || err != nil && err.Error() != test.want {
			t.Errorf("%s: got %v, want %s", test.config, err, test.want)
		}
	}
	err := (Allowance{}).Check(&Config{MTU: new(1400)})
	if err == nil || err.Error() != "mtu 1400: claims may not set it; they may set: nothing" {
		t.Error(err)
	}
}

func TestLimit(t *testing.T) {
	const ranges = `want ranges such as "100-199,300", or a number for the maximum`
	for _, test := range []struct {
		key   string
		limit any
		want  string // the ranges, or the error
	}{
		{"mtu", json.Number("9000"), "68-9000"},
		{"mtu", "1400,1500", "1400,1500"},
		{"vlan", "0,7-9", "0,7-9"},
		{"vlan", json.Number("7"), `7: want ranges in quotes, such as "100-199,300"`},
		{"vlan", "", `"": want numbers and ranges, such as 100-199,300`},
		{"vlan", "1-", `"1-": want numbers and ranges, such as 100-199,300`},
		{"vlan", "1-2-3", `"1-2-3": want numbers and ranges, such as 100-199,300`},
		{"vlan", "5-4", `"5-4": 5-4: want the smaller number first`},
		{"vlan", "1-4095", `"1-4095": 4095: want 0-4094, 0 for none`},
		{"vlan", nil, "null: " + ranges},
		{"vlan", strict.List{{}}, "a list: " + ranges},
		{"vlan", true, "true: " + ranges},
		{"maxTxRate", json.Number("0"), "0: want the maximum that a claim may set"},
		{"maxTxRate", json.Number("1.5"), "1.5: want the maximum that a claim may set"},
		{"mtu", json.Number("66000"), "66000: want the maximum that a claim may set"},
		{"trust", "on", `"on": only numbers can have a limit: list "trust" itself, which allows any valid value`},
		{"vlann", "1", "unknown key; did you mean vlan?"},
	} {
		a := Allowance{}
		err := a.Limit(test.key, strict.Value{Data: test.limit})
		got := text(a[test.key])
		if err != nil {
			got = err.Error()
		}
		if got != test.want {
			t.Errorf("%s %v: got %s, want %s", test.key, test.limit, got, test.want)
		}
	}
	a := DefaultAllowance()
	if err := a.Limit("mtu", strict.Value{Data: "68"}); err == nil || err.Error() != "duplicate key" || a["mtu"] != nil {
		t.Errorf("%v, %v", err, a)
	}
	if err := a.Allow("vlan"); err != nil || !cmp.Equal(a.Check(&Config{VLAN: new(0)}), error(nil)) {
		t.Error(err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package vfconfig

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/pcitest"
)

func full() Config {
	return Config{VLAN: new(100), VLANQoS: new(3), VLANProto: "802.1ad", MAC: "02:00:00:00:00:01", SpoofChk: "on", Trust: "off",
		LinkState: "auto", MinTxRate: new(1), MaxTxRate: new(1000), MTU: new(9000), Driver: "vfio-pci", Rebind: new(false),
		IfName: "fast{index}", IPs: []string{"10.0.0.9/24", "fd00::9"}}
}

func TestKeys(t *testing.T) {
	var names []string
	for f := range reflect.TypeFor[Config]().Fields() {
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "-" && name != claimedKey {
			names = append(names, name)
		}
	}
	if diff := cmp.Diff(names, Keys()); diff != "" {
		t.Error(diff)
	}
	c := full()
	if diff := cmp.Diff(Keys(), c.Set()); diff != "" || c.fieldOf("x") != nil || c.IsZero() || !(*Config)(nil).IsZero() {
		t.Error(diff)
	}
}

// TestRoundTrip checks that parameters and records keep the settings.
func TestRoundTrip(t *testing.T) {
	want := full()
	want.Claimed = []string{"vlan", "ips"}
	data, err := json.Marshal(want)
	var got Config
	if err == nil {
		err = json.Unmarshal(data, &got)
	}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	want.Claimed = nil
	data, err = parameters("example.com/fast", want)
	if err != nil {
		t.Fatal(err)
	}
	e, err := Decode(data, "p")
	if diff := cmp.Diff(Entry{"example.com/fast", want}, e); err != nil || diff != "" {
		t.Errorf("%s: %v\n%s", data, err, diff)
	}
}

// TestUnknownInRecord reads a record of another version of Podlace, whose settings Validate must refuse.
func TestUnknownInRecord(t *testing.T) {
	var got struct{ Config *Config }
	if err := json.Unmarshal([]byte(`{"Config":{"vlan":5,"vlan2":[{"a":{}}]}}`), &got); err != nil {
		t.Fatal(err)
	}
	const want = `"vlan2": this version does not know the key`
	if err := got.Config.Validate(); err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	if err := Merge(nil, got.Config).Validate(); err == nil || err.Error() != want || *got.Config.VLAN != 5 {
		t.Errorf("merged: got %v, want %s", err, want)
	}
	var none struct{ Config *Config }
	if err := json.Unmarshal([]byte(`{"Config":null}`), &none); err != nil || none.Config != nil || none.Config.Validate() != nil {
		t.Errorf("%v, %v", none.Config, err)
	}
}

// TestMerge checks that later settings override earlier ones key by key, even with false and 0, and that the arguments stay unchanged.
func TestMerge(t *testing.T) {
	for name, test := range map[string]struct{ base, over, want *Config }{
		"nothing":         {nil, nil, &Config{}},
		"only the first":  {&Config{VLAN: new(5), IPs: []string{"10.0.0.1"}}, nil, &Config{VLAN: new(5), IPs: []string{"10.0.0.1"}}},
		"only the second": {nil, &Config{Trust: "on", Claimed: []string{"trust"}}, &Config{Trust: "on", Claimed: []string{"trust"}}},
		"one each":        {&Config{VLAN: new(5)}, &Config{MTU: new(1400)}, &Config{VLAN: new(5), MTU: new(1400)}},
		"zero counts": {&Config{VLAN: new(5), Rebind: new(true), Trust: "on"}, &Config{VLAN: new(0), Rebind: new(false), Trust: "off"},
			&Config{VLAN: new(0), Rebind: new(false), Trust: "off"}},
		"lists are replaced": {&Config{IPs: []string{"10.0.0.1", "fd00::1"}}, &Config{IPs: []string{"10.0.0.2"}},
			&Config{IPs: []string{"10.0.0.2"}}},
		"claimed keys": {&Config{Claimed: []string{"mac", "ips"}[:1]}, &Config{Claimed: []string{"mtu", "mac"}},
			&Config{Claimed: []string{"mac", "mtu"}}},
	} {
		t.Run(name, func(t *testing.T) {
			before := asJSON(t, test.base, test.over)
			got := Merge(test.base, test.over)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(before, asJSON(t, test.base, test.over)); diff != "" {
				t.Error(diff)
			}
		})
	}
	all := full()
	if diff := cmp.Diff(&all, Merge(&Config{}, &all)); diff != "" {
		t.Error(diff)
	}
}

func asJSON(t *testing.T, configs ...*Config) string {
	t.Helper()
	text, err := json.Marshal(configs)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func entryText(keys string) string {
	return `{"apiVersion":"sriov.podlace.io/v1alpha1","kind":"VFConfig",` + keys + `}`
}

// TestDecode checks that the errors of malformed or unsupported parameters contain their path.
func TestDecode(t *testing.T) {
	const known = "apiVersion, driver, ifName, ips, kind, linkState, mac, maxTxRate, minTxRate, mtu, rebind, resource, spoofchk, trust, vlan, " +
		"vlanProto, vlanQoS"
	const end = ": the text ends here: a }, a ] or a quote is missing"
	for _, test := range []struct{ data, want string }{
		{"", ": the text is empty: want JSON"},
		{"null", ": null: want an object"},
		{"[]", ": a list: want an object"},
		{"{", end},
		{`{"kind":"VFConfig"}`, ": apiVersion is missing: want sriov.podlace.io/v1alpha1"},
		{`{"apiVersion":"sriov.podlace.io/v1alpha1"}`, ": kind is missing: want VFConfig"},
		{`{"apiVersion":"sriov.podlace.io/v1","kind":"VFConfig"}`, `.apiVersion: "sriov.podlace.io/v1": want sriov.podlace.io/v1alpha1`},
		{`{"apiVersion":"sriov.podlace.io/v1alpha1","kind":"VfConfig"}`, `.kind: "VfConfig": want VFConfig`},
		{`{"apiVersion":1,"kind":"VFConfig"}`, `.apiVersion: 1: want a string`},
		{entryText(`"resource":"fast"`), `.resource: "fast": want the name of a resource, such as example.com/fast`},
		{entryText(`"resource":""`), `.resource: "": want the name of a resource, such as example.com/fast`},
		{entryText(`"resource":["a/b"]`), `.resource: a list: want a string`},
		{entryText(`"vlann":1`), ".vlann: unknown key; did you mean vlan?"},
		{entryText(`"VLAN":1`), ".VLAN: unknown key; did you mean vlan?"},
		{entryText(`"max_tx_rate":1`), ".max_tx_rate: unknown key; did you mean maxTxRate?"},
		{entryText(`"claimed":["vlan"]`), ".claimed: unknown key; known keys: " + known},
		{entryText(`"":1`), `."": unknown key; known keys: ` + known},
		{entryText(`"a\nb":1`), `."a\nb": unknown key; known keys: ` + known},
		{entryText(`"vlan":1,"vlan":1`), ".vlan: duplicate key"},
		{entryText(`"vlan":1,"kind":"VFConfig"`), ".kind: duplicate key"},
		{entryText(`"vlan":1`) + "{}", ": no JSON: invalid character '{' after top-level value"},
		{entryText(`"vlan":1`) + "}", ": no JSON: invalid character '}' after top-level value"},
		{entryText(`"vlan":1`)[:67], end},
		{entryText(`"vlan":"1"`), `.vlan: "1": want a number`},
		{entryText(`"vlan":1.5`), `.vlan: 1.5: want a whole number`},
		{entryText(`"vlan":1e2`), `.vlan: 1e2: want a whole number`},
		{entryText(`"vlan":99999999999999999999`), `.vlan: 99999999999999999999: want a whole number`},
		{entryText(`"vlan":null`), `.vlan: null: want a number`},
		{entryText(`"vlan":{}`), `.vlan: an object: want a number`},
		{entryText(`"vlan":-1`), `.vlan: -1: want 0-4094, 0 for none`},
		{entryText(`"vlan":4095`), `.vlan: 4095: want 0-4094, 0 for none`},
		{entryText(`"vlanQoS":8`), `.vlanQoS: 8: want 0-7`},
		{entryText(`"vlanProto":"802.1x"`), `.vlanProto: "802.1x": want 802.1q or 802.1ad`},
		{entryText(`"vlan":0,"vlanQoS":3`), `: vlanQoS and vlanProto need a vlan that is not 0`},
		{entryText(`"mac":""`), `.mac: "": want a unicast MAC address of 6 bytes`},
		{entryText(`"mac":"01:00:00:00:00:01"`), `.mac: "01:00:00:00:00:01": want a unicast MAC address of 6 bytes`},
		{entryText(`"mac":["02:00:00:00:00:01"]`), `.mac: a list: want a string`},
		{entryText(`"spoofchk":true`), `.spoofchk: true: want a string in quotes, because YAML takes on, off, yes and no for booleans`},
		{entryText(`"spoofchk":"yes"`), `.spoofchk: "yes": want on or off`},
		{entryText(`"trust":"On"`), `.trust: "On": want on or off`},
		{entryText(`"linkState":"up"`), `.linkState: "up": want auto, enable or disable`},
		{entryText(`"minTxRate":-1`), `.minTxRate: -1: want Mbit/s, 0 for no limit`},
		{entryText(`"maxTxRate":2147483648`), `.maxTxRate: 2147483648: want Mbit/s, 0 for no limit`},
		{entryText(`"maxTxRate":5,"minTxRate":6`), `: minTxRate 6: more than maxTxRate 5`},
		{entryText(`"mtu":0`), `.mtu: 0: want 68-65535`},
		{entryText(`"driver":""`), `.driver: "": want the name of a driver, such as vfio-pci`},
		{entryText(`"driver":"../x"`), `.driver: "../x": want the name of a driver, such as vfio-pci`},
		{entryText(`"rebind":"true"`), `.rebind: "true": want true or false`},
		{entryText(`"ifName":""`), `.ifName: "": must not be empty`},
		{entryText(`"ifName":"eth0"`), `.ifName: "eth0": every pod already has an interface of this name`},
		{entryText(`"ifName":"lo"`), `.ifName: "lo": every pod already has an interface of this name`},
		{entryText(`"ifName":"a/b"`), `.ifName: "a/b": character '/' is not allowed`},
		{entryText(`"ifName":"abcdefghijklmn{index}"`), `.ifName: "abcdefghijklmn{index}": 16 bytes, want at most 15`},
		{entryText(`"ifName":"{index}{index}"`), `.ifName: "{index}{index}": {index} stands twice`},
		{entryText(`"ips":"10.0.0.1"`), `.ips: "10.0.0.1": want a list`},
		{entryText(`"ips":[]`), `.ips: the list is empty`},
		{entryText(`"ips":[1]`), `.ips[0]: 1: want a string`},
		{entryText(`"ips":["10.0.0.1","10.0.0"]`), `.ips[1]: "10.0.0": want an address, with or without a prefix length`},
		{entryText(`"mtu":1400`) + strings.Repeat(" ", 10<<10), ": 10311 bytes: want at most 10240"},
	} {
		e, err := Decode([]byte(test.data), "config[2].parameters")
		if want := "config[2].parameters" + test.want; err == nil || err.Error() != want {
			t.Errorf("%.200s\n got %v, %v\nwant %s", test.data, e, err, want)
		}
	}
	e, err := Decode([]byte(entryText(`"vlan":-1,"vlann":1,"mtu":1400,"mtu":1400`)), "p")
	if err == nil || strings.Count(err.Error(), "\n") != 2 || !cmp.Equal(e, Entry{"", Config{MTU: new(1400)}}) {
		t.Errorf("%v, %v: want all three errors, and the mtu", e, err)
	}
	e, err = Decode([]byte(entryText(`"vlanQoS":3,"vlanProto":"802.1AD"`)), "p") // the conflist may set the vlan
	if want := (Entry{"", Config{VLANQoS: new(3), VLANProto: "802.1AD"}}); err != nil || !cmp.Equal(want, e) {
		t.Errorf("%v, %v", e, err)
	}
}

// TestComplete checks that errors about contradictions spell the keys as the conflist or claim does.
func TestComplete(t *testing.T) {
	name := func(key string) string { return strings.ToUpper(key) }
	for _, test := range []struct {
		config Config
		want   string
	}{
		{full(), ""},
		{Config{VLANQoS: new(3)}, "VLANQOS and VLANPROTO need a VLAN that is not 0"},
		{Config{VLAN: new(0), VLANProto: "802.1ad"}, "VLANQOS and VLANPROTO need a VLAN that is not 0"},
		{Config{VLANQoS: new(0), VLANProto: "802.1Q"}, ""},
		{Config{MinTxRate: new(7), MaxTxRate: new(5)}, "MINTXRATE 7: more than MAXTXRATE 5"},
		{Config{MinTxRate: new(7), MaxTxRate: new(0)}, ""},
		{Config{MTU: new(1)}, "MTU 1: want 68-65535"},
		{Config{IPs: []string{""}}, `IPS "": want an address, with or without a prefix length`},
	} {
		if err := test.config.Complete(name); err == nil && test.want != "" || err != nil && err.Error() != test.want {
			t.Errorf("%s: got %v, want %s", &test.config, err, test.want)
		}
	}
}

func TestString(t *testing.T) {
	c := Config{VLAN: new(0), MAC: "02:00:00:00:00:01", Rebind: new(true), IPs: []string{"10.0.0.1"}}
	if got, want := c.String(), `vlan 0, mac "02:00:00:00:00:01", rebind true, ips ["10.0.0.1"]`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// parameters encodes an entry as Decode reads it.
func parameters(resource string, c Config) ([]byte, error) {
	return json.Marshal(struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Resource   string `json:"resource,omitempty"`
		Config
	}{APIVersion, Kind, resource, c})
}

// FuzzDecode checks that Decode returns either settings, which survive encoding and decoding, or an error, each line of which begins
// with the path.
func FuzzDecode(f *testing.F) {
	c := full()
	data, _ := parameters("example.com/fast", c)
	for _, seed := range []string{string(data), "", "{}", entryText(`"vlan":1`), entryText(`"vlan":1,"vlan":2`),
		entryText(`"ips":["10.0.0.1/8"]`), entryText(`"\u0000":[]`)} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		e, err := Decode(data, "config[0].parameters")
		if err != nil {
			lines := strings.Split(err.Error(), "\n")
			if slices.ContainsFunc(lines, func(l string) bool { return !strings.HasPrefix(l, "config[0].parameters") }) {
				t.Errorf("%q: %v, %q", data, e, err)
			}
			return
		}
		again, err := parameters(e.Resource, e.Config)
		if err != nil {
			t.Fatal(err)
		}
		same, err := Decode(again, "p")
		if diff := cmp.Diff(e, same); err != nil || diff != "" {
			t.Errorf("%q: %v\n%s", data, err, diff)
		}
		for _, key := range e.Set() {
			if !slices.Contains(Keys(), key) || e.Text(key) == "" {
				t.Errorf("%q: %s %s", data, key, e.Text(key))
			}
		}
	})
}

// FuzzRecord checks that no setting in a record is lost unless Validate returns an error.
func FuzzRecord(f *testing.F) {
	data, _ := json.Marshal(full())
	for _, seed := range []string{string(data), "{}", `{"x":1}`, `{"claimed":["vlan"],"vlan":1}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var raw map[string]json.RawMessage
		var c Config
		if err := json.Unmarshal(data, &c); err != nil || json.Unmarshal(data, &raw) != nil || raw == nil {
			return
		}
		for key := range raw {
			if key != claimedKey && !c.Has(key) && c.Validate() == nil {
				t.Errorf("%q: %s is lost", data, key)
			}
		}
	})
}

func TestNeedsPF(t *testing.T) {
	for _, s := range pcitest.SettingsWithoutPF() {
		var c Config
		if err := json.Unmarshal([]byte("{"+s.JSON+"}"), &c); err != nil {
			t.Fatal(err)
		}
		if c.NeedsPF(false) != s.Interface || c.NeedsPF(true) != s.Userspace {
			t.Errorf("%s: %q, %q", s.JSON, c.NeedsPF(false), c.NeedsPF(true))
		}
	}
	if (*Config)(nil).NeedsPF(true) != "" {
		t.Error("no settings need a PF")
	}
}

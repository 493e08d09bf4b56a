// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"encoding/json"
	"slices"
	"testing"
)

func TestParseAddress(t *testing.T) {
	for s, want := range map[string]string{
		"0000:3b:10.2": "0000:3b:10.2", "0000:3B:1f.7": "0000:3b:1f.7", "10000:01:00.0": "10000:01:00.0", "ffffffff:ff:1f.7": "ffffffff:ff:1f.7",
		"": "", "3b:10.2": "", "0000:3b:10": "", "0000:3b:20.0": "", "0000:3b:10.8": "", "0000:3g:10.0": "", " 0000:3b:10.2": "",
		"0000:3b:10.2\n": "", "123456789:00:00.0": "", "000:3b:10.2": "", "+000:3b:10.2": "", "0000:3b:10.02": "", "0000:3b:10.2.0": "",
		"0000::10.2": "",
	} {
		a, err := ParseAddress(s)
		if a.String() != want || (err == nil) != (want != "") || a.IsValid() != (want != "") {
			t.Errorf("%q: %q, %v", s, a, err)
		}
		if again, err := ParseAddress(a.String()); want != "" && (again != a || err != nil) {
			t.Errorf("%q: again %q, %v", s, again, err)
		}
	}
}

func TestAddressOrder(t *testing.T) {
	var want, got []Address
	for _, s := range []string{"", "0000:3b:00.0", "0000:3b:00.1", "0000:3b:0a.0", "0000:3b:10.0", "0000:a0:00.0", "0001:00:00.0",
		"10000:00:00.0"} {
		var a Address
		if err := a.UnmarshalText([]byte(s)); err != nil {
			t.Fatal(err)
		}
		want, got = append(want, a), append([]Address{a}, got...)
	}
	if slices.SortFunc(got, Address.Compare); !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
}

func TestAddressJSON(t *testing.T) {
	in := map[Address]Address{}
	a, _ := ParseAddress("0000:3b:10.2")
	in[a] = a
	data, err := json.Marshal(in)
	if err != nil || string(data) != `{"0000:3b:10.2":"0000:3b:10.2"}` {
		t.Fatalf("%s, %v", data, err)
	}
	var out map[Address]Address
	if err := json.Unmarshal(data, &out); err != nil || out[a] != a {
		t.Errorf("%v, %v", out, err)
	}
	if err := json.Unmarshal([]byte(`{"x":""}`), &out); err == nil {
		t.Error("x is taken for an address")
	}
}

// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/plugin"
)

// ADD refuses a hostIP with an ambiguous spelling, or at which no client can reach a pod (S-09).
func TestHostIPRefused(t *testing.T) {
	const noAddress, group, local, loopback = "want an IP address", "not one of a group", "link-local addresses are not routed",
		"cannot route from ::1"
	for addr, says := range map[string]string{"010.0.0.1": noAddress, "10.0.1": noAddress, "0x7f.0.0.1": noAddress, "2130706433": noAddress,
		"127.1":        noAddress,
		"192.0.2.1/32": noAddress, " 192.0.2.1": noAddress, "192.0.2.1:80": noAddress, "[2001:db8::1]": noAddress, "::ffff:192.0.2.1": noAddress,
		"::ffff:c000:201":  noAddress,
		"2001:db8::1%eth0": noAddress, "fe80::1%1": noAddress, "node.example": noAddress, "localhost": noAddress, "*": noAddress,
		"1.1.1.256": noAddress,
		"224.0.0.1": group, "239.255.255.255": group, "255.255.255.255": group, "ff02::1": group, "ff0e::1": group, "fe80::1": local,
		"febf::1": local,
		"::1":     loopback, "0:0:0:0:0:0:0:1": loopback} {
		_, err := parsed(withMappings(`{"hostPort":80,"containerPort":80,"hostIP":"` + addr + `"}`))
		if plugin.Code(err) != plugin.CodeConfig || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), "portMappings[0]") {
			t.Errorf("%s: %v, want %q", addr, err, says)
		}
	}
	for _, addr := range []string{"127.0.0.1", "127.0.0.53", "169.254.20.10", "0.0.0.0", "::", "2001:DB8::1", "fd00::1", "fec0::1",
		"240.0.0.1"} {
		if _, err := parsed(withMappings(`{"hostPort":80,"containerPort":80,"hostIP":"` + addr + `"}`)); err != nil {
			t.Errorf("%s: %v", addr, err)
		}
	}
}

// podAddresses returns the first address of each family on the pod's interface.
func TestPodAddresses(t *testing.T) {
	const interfaces = `"interfaces":[{"name":"br"},{"name":"eth0"},{"name":"eth0","sandbox":"x"},{"name":"net1","sandbox":"x"}],`
	for body, want := range map[string]string{
		`"ips":[]`: "[]",
		interfaces + `"ips":[{"address":"10.0.0.1/24","interface":0},{"address":"10.0.0.2/24","interface":1},{"address":"10.0.0.3/24","interface":3},
			{"address":"10.0.0.4/24","interface":2},{"address":"10.0.0.5/24","interface":2}]`: "[10.0.0.4/24]",
		interfaces + `"ips":[{"address":"10.0.0.4/24"},{"address":"fd00::4/64"}]`:                                  "[10.0.0.4/24 fd00::4/64]",
		interfaces + `"ips":[{"address":"fd00::4/64","interface":2},{"address":"10.0.0.4/24","interface":2}]`:      "[10.0.0.4/24 fd00::4/64]",
		interfaces + `"ips":[{"address":"10.0.0.4/24","interface":9},{"address":"10.0.0.5/24","interface":-1},{}]`: "[]",
	} {
		var prev types100.Result
		if err := json.Unmarshal([]byte("{"+body+"}"), &prev); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(podAddresses(&prev, "eth0")); got != want {
			t.Errorf("%s: %s, want %s", body, got, want)
		}
	}
}

func TestHostPorts(t *testing.T) {
	c, err := parsed(`"masqAll":true,` + withMappings(`{"hostPort":1,"containerPort":11}`,
		`{"hostPort":2,"containerPort":12,"hostIP":"192.0.2.1"}`,
		`{"hostPort":3,"containerPort":13,"hostIP":"2001:db8::1"}`, `{"hostPort":4,"containerPort":14,"hostIP":"0.0.0.0"}`,
		`{"hostPort":5,"containerPort":15,"hostIP":"::"}`,
		`{"hostPort":1,"containerPort":11,"protocol":"tcp"}`))
	if err != nil {
		t.Fatal(err)
	}
	four, six := netip.MustParsePrefix("10.1.0.5/24"), netip.MustParsePrefix("fd00::5/64")
	for _, x := range []struct {
		pod  []netip.Prefix
		want string
	}{
		{nil, ""},
		{[]netip.Prefix{four}, "tcp 1>10.1.0.5:11 tcp 192.0.2.1:2>10.1.0.5:12 tcp 4>10.1.0.5:14"},
		{[]netip.Prefix{six}, "tcp 1>[fd00::5]:11 tcp [2001:db8::1]:3>[fd00::5]:13 tcp 5>[fd00::5]:15"},
		{[]netip.Prefix{four, six}, "tcp 1>10.1.0.5:11 tcp 1>[fd00::5]:11 tcp 192.0.2.1:2>10.1.0.5:12 tcp [2001:db8::1]:3>[fd00::5]:13 tcp 4>10.1.0.5:14 tcp 5>[fd00::5]:15"},
	} {
		var got []string
		for _, p := range c.hostPorts(x.pod) {
			got = append(got, p.String()+">"+p.To.String())
			if !p.SNAT || !p.MasqAll {
				t.Errorf("%+v", p)
			}
		}
		if diff := cmp.Diff(x.want, strings.Join(got, " ")); diff != "" {
			t.Errorf("%v:\n%s", x.pod, diff)
		}
	}
	c.SNAT = false
	if p := c.hostPorts([]netip.Prefix{four})[0]; p.SNAT || p.MasqAll {
		t.Errorf("without snat: %+v", p)
	}
}

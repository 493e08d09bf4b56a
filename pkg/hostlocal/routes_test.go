// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/plugin"
)

// Routes in the result of ADD have the same JSON as those of the reference plugin.
func TestRoutes(t *testing.T) {
	for _, text := range []string{
		`[{"dst":"0.0.0.0/0"},{"dst":"192.168.0.0/16","gw":"10.9.9.9"},{"dst":"::/0","gw":"fe80::1"}]`, // gateways outside the subnets
		`[{"dst":"169.254.1.1/32","scope":253},{"dst":"0.0.0.0/0","gw":"169.254.1.1","mtu":1400,"advmss":1360,"priority":9,"table":100}]`,
		// different routes may have the same destination
		`[{"dst":"0.0.0.0/0","gw":"10.1.2.1"},{"dst":"0.0.0.0/0","gw":"10.1.2.9"},{"dst":"0.0.0.0/0","gw":"10.1.2.1","priority":5}]`,
		`[{"dst":"0.0.0.0/0","mtu":65535,"advmss":65535,"priority":2147483647,"table":0,"scope":254}]`,
		`[{"dst":"2001:db8::5/64"}]`, // the kernel drops the host bits
	} {
		cfg, err := parsed(`{"ipam":{"subnet":"10.1.2.0/24","routes":`+text+`}}`, nil)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		got, err := json.Marshal(cfg.Routes)
		if diff := cmp.Diff(text, string(got)); diff != "" || err != nil {
			t.Errorf("%v\n%s", err, diff)
		}
	}
}

func TestRoutesRefused(t *testing.T) {
	l := newLab(t, "")
	for routes, says := range map[string]string{
		`[{"dst":"0.0.0.0/0"},{"dst":"10.9.1.1/16"}]`:                                              "ipam routes[1]: dst 10.9.1.1/16: has host bits set, want 10.9.0.0/16",
		`[{"dst":"0.0.0.0/0","gw":"10.1.2.1"},{"dst":"::/0"},{"dst":"0.0.0.0/0","gw":"10.1.2.1"}]`: "ipam routes[2]: the route to 0.0.0.0/0 is the same as routes[0]",
		`[{"dst":"0.0.0.0/0","gw":"fd00::1"}]`:                                                     `ipam routes[0]: gw "fd00::1": want an address of the family of dst 0.0.0.0/0`,
		`[{"dst":"::/0","gw":"10.1.2.1"}]`:                                                         `gw "10.1.2.1": want an address of the family of dst ::/0`,
		`[{"dst":"::/0","gw":"fe80::1%eth0"}]`:                                                     `gw "fe80::1%eth0"`,
		`[{"dst":"0.0.0.0/0","mtu":-1}]`:                                                           "ipam routes[0]: mtu -1: want 0-65535",
		`[{"dst":"0.0.0.0/0","advmss":99999999}]`:                                                  "advmss 99999999: want 0-65535",
		`[{"dst":"0.0.0.0/0","mtu":65536}]`:                                                        "mtu 65536: want 0-65535",
		`[{"dst":"0.0.0.0/0","advmss":-1}]`:                                                        "advmss -1: want 0-65535",
		`[{"dst":"0.0.0.0/0","scope":300}]`:                                                        "scope 300: want 0-254",
		`[{"dst":"0.0.0.0/0","scope":255}]`:                                                        "scope 255: want 0-254",
		`[{"dst":"0.0.0.0/0","table":-1}]`:                                                         "table -1: want 0-4294967295",
		`[{"dst":"0.0.0.0/0","priority":-5}]`:                                                      "priority -5: want 0-4294967295",
		`[{"dst":"10.1.2.1"}]`:                                                                     `ipam routes[0]: dst "10.1.2.1": want an address and prefix length`,
		`[{"gw":"10.1.2.1"}]`:                                                                      "an entry has no dst",
	} {
		bad := l
		bad.ipam += `"subnet":"10.1.2.0/24","routes":` + routes
		bad.mustFail(bad.call("ADD", "a", ""), plugin.CodeConfig, says)
	}
	good := l
	good.ipam += `"subnet":"10.1.2.0/24"`
	good.mustGive("a", "10.1.2.2/24") // the refused ADD took no address
	if n := len(good.files()); n != 3 {
		t.Errorf("left %v", good.files())
	}
}

// An error about a value of the wrong type names the key.
func TestKindsOfValues(t *testing.T) {
	for ipam, says := range map[string]string{
		`"ranges":[{"subnet":"10.1.2.0/24"}]`:            "an entry of ipam.ranges is an object: want a list of objects",
		`"ranges":{"subnet":"10.1.2.0/24"}`:              "ipam.ranges is an object: want a list of lists of objects",
		`"ranges":[[{"subnet":10}]]`:                     "ipam.ranges.subnet is a number: want a string",
		`"subnet":["10.1.2.0/24"]`:                       "ipam.subnet is a list: want a string",
		`"subnet":"10.1.2.0/24","gateway":1`:             "ipam.gateway is a number: want a string",
		`"subnet":"10.1.2.0/24","routes":{"dst":"::/0"}`: "ipam.routes is an object: want a list of objects",
		`"subnet":"10.1.2.0/24","routes":["::/0"]`:       "an entry of ipam.routes is a string: want an object",
		`"subnet":"10.1.2.0/24","routes":[{"dst":7}]`:    "ipam.routes.dst is a number: want a string",
		`"subnet":"10.1.2.0/24","strictStatus":"yes"`:    "ipam.strictStatus is a string: want true or false",
	} {
		l := newLab(t, ipam)
		l.mustFail(l.call("ADD", "a", ""), plugin.CodeDecode, "network configuration: "+says)
	}
}

// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/nodefile"
)

// One configuration works for dual-stack, IPv4 and IPv6 nodes. A pod gets no routes of a family in which it has no address.
func TestFamilies(t *testing.T) {
	const routes = `"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"},{"dst":"192.0.2.0/24","gw":"10.1.2.9"}]`
	const both = `"ranges":[[{"subnet":"usePodCidr"}],[{"subnet":"usePodCidrIPv6"}]],` + routes
	for _, c := range []struct{ what, podCIDRs, ipam, routes string }{
		{"both", `"10.1.2.0/24","fd00:1::/64"`, both, "0.0.0.0/0 ::/0 192.0.2.0/24"},
		{"IPv4", `"10.1.2.0/24"`, both, "0.0.0.0/0 192.0.2.0/24"},
		{"IPv6", `"fd00:1::/64"`, both, "::/0"},
		{"one word: all routes stay", `"10.1.2.0/24"`, `"subnet":"usePodCidr",` + routes, "0.0.0.0/0 ::/0 192.0.2.0/24"},
		{"a further range of the family", `"fd00:1::/64"`, strings.Replace(both, "[[", `[[{"subnet":"10.9.0.0/24"}],[`, 1),
			"0.0.0.0/0 ::/0 192.0.2.0/24"},
	} {
		t.Run(c.what, func(t *testing.T) {
			writeNode(t, nodefile.Path, `{"podCIDRs":[`+c.podCIDRs+`]}`)
			cfg, err := parsed(`{"ipam":{`+c.ipam+`}}`, nil)
			var got []string
			for _, r := range cfg.Routes {
				got = append(got, r.Dst.String())
			}
			if diff := cmp.Diff(strings.Fields(c.routes), got); err != nil || diff != "" {
				t.Errorf("%v\n%s", err, diff)
			}
		})
	}
}

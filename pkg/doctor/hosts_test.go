// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"strings"
	"testing"
)

// TestFirewalldChain: the chain of firewalld ends with a reject. Only firewalld can add a rule to its table, so the check names the zone.
func TestFirewalldChain(t *testing.T) {
	l := newLab(t)
	l.run("firewalld")
	l.nft("table inet firewalld { chain filter_FORWARD { type filter hook forward priority 10; ct state established accept; reject; }; }")
	if found := l.problems("forward-policy"); len(found) != 1 || !strings.Contains(found[0], "| firewall-cmd --permanent --zone=trusted") {
		t.Errorf("%q", found)
	}
}

// TestDottedLink: the remedies contain names that sysctl(8) accepts, also for links such as lan.5, which are common for VLANs.
func TestDottedLink(t *testing.T) {
	l := newLab(t)
	l.uplink("lan.5", "lan.6")
	for path, value := range map[string]string{"all/rp_filter": "0", "lan.5/rp_filter": "1", "lan.6/rp_filter": "1"} {
		l.sysctl("ipv4/conf/"+path, value)
	}
	l.sysctl("ipv6/conf/all/forwarding", "1")
	l.sysctl("ipv6/conf/lan.5/accept_ra", "1")
	l.sysctl("ipv6/conf/lan.6/accept_ra", "2")
	for check, want := range map[string]int{"rp-filter": 2, "router-advertisements": 1} {
		found, err := Examine(l.Options, check)
		if err != nil || len(found) != want {
			t.Fatalf("%s: %+v, %v", check, found, err)
		}
		for _, f := range found {
			l.command("sh", "-c", f.Command)
		}
		if left := l.problems(check); len(left) > 0 {
			t.Errorf("%s: after the remedy still %q", check, left)
		}
	}
}

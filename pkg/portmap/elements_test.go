// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"
	"strings"
	"testing"
)

func TestKeys(t *testing.T) {
	for text, want := range map[string]string{
		"tcp 8080 10.1.0.5:80":               "ports4 06000000 1f900000 = 0a010005 00500000; snat4 0a010005 06000000 1f900000",
		"udp 192.0.2.1:53 10.1.0.5:5353":     "hostip_ports4 c0000201 11000000 00350000 = 0a010005 14e90000; snat4 0a010005 11000000 00350000",
		"sctp 1 [fd00::5]:65535":             "ports6 84000000 00010000 = fd000000000000000000000000000005 ffff0000; snat6 fd000000000000000000000000000005 84000000 00010000",
		"tcp [2001:db8::1]:443 [fd00::5]:80": "hostip_ports6 20010db8000000000000000000000001 06000000 01bb0000 = fd000000000000000000000000000005 00500000; snat6 fd000000000000000000000000000005 06000000 01bb0000",
	} {
		var parts []string
		for _, e := range elementsOf(portFrom(text), "x") {
			part := fmt.Sprintf("%s %x", e.Set, e.Key)
			if e.Value != nil {
				part += fmt.Sprintf("=%x", e.Value)
			}
			parts = append(parts, part)
		}
		if got := strings.Join(parts, ";"); squeeze(got) != squeeze(want) {
			t.Errorf("%s:\n got %s\nwant %s", text, got, want)
		}
	}
	all := portFrom("tcp 80 10.1.0.5:80")
	all.MasqAll = true
	if list := elementsOf(all, "x"); len(list) != 3 || list[2].Set != "masqall4" {
		t.Errorf("got %+v", list)
	}
	all.SNAT, all.MasqAll = false, false
	if list := elementsOf(all, "x"); len(list) != 1 {
		t.Errorf("without SNAT: %+v", list)
	}
}

func squeeze(s string) string { return strings.ReplaceAll(s, " ", "") }

func TestHostPortText(t *testing.T) {
	for text, want := range map[string]string{
		"tcp 8080 10.1.0.5:80": "tcp 8080", "udp 192.0.2.1:53 10.1.0.5:53": "udp 192.0.2.1:53",
		"sctp [2001:db8::1]:1 [fd00::5]:1": "sctp [2001:db8::1]:1",
	} {
		if got := portFrom(text).String(); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	for _, e := range elementsOf(portFrom("udp 192.0.2.1:53 10.1.0.5:5353"), "x") {
		if got := portOf(e).String(); isForward(e) && got != "udp 192.0.2.1:53" {
			t.Errorf("%s: %s", e.Set, got)
		}
	}
}

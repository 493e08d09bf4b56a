// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"
)

// newPort returns a Port that is forwarded to the same port number of a pod.
func newPort(protocol, hostIP string, first, last uint16, pod string) Port {
	p := Port{Protocol: protocol, Port: first, Last: last, To: netip.AddrPortFrom(netip.MustParseAddr(pod), first)}
	if hostIP != "" {
		p.HostIP = netip.MustParseAddr(hostIP)
	}
	return p
}

// The format of ports in attachment records does not change.
func TestJSON(t *testing.T) {
	whole := newPort("udp", "192.0.2.1", 53, 60, "10.1.0.5")
	whole.SNAT, whole.MasqAll = true, true
	for want, p := range map[string]Port{
		`{"protocol":"tcp","port":80,"to":"10.1.0.5:80"}`: newPort("tcp", "", 80, 0,
			"10.1.0.5"),
		`{"protocol":"udp","hostIP":"192.0.2.1","port":53,"last":60,"to":"10.1.0.5:53","snat":true,"masqAll":true}`: whole,
	} {
		got, err := json.Marshal(p)
		var back Port
		if err != nil || string(got) != want || json.Unmarshal(got, &back) != nil || back != p {
			t.Errorf("%s, %v, want %s", got, err, want)
		}
	}
}

func TestOverlaps(t *testing.T) {
	of := newPort("tcp", "", 100, 200, "10.1.0.5")
	var index Index
	index.Add("a", of)
	for _, c := range []struct {
		p                Port
		overlaps, covers bool
	}{
		{newPort("tcp", "", 100, 0, "10.1.0.6"), true, true}, {newPort("tcp", "", 200, 0, "10.1.0.6"), true, true},
		{newPort("tcp", "", 99, 0, "10.1.0.6"), false, false},
		{newPort("tcp", "", 150, 300, "10.1.0.6"), true, false}, {newPort("tcp", "", 150, 160, "10.1.0.6"), true, true},
		{newPort("tcp", "", 201, 300, "10.1.0.6"), false, false},
		{newPort("udp", "", 150, 0, "10.1.0.6"), false, false}, {newPort("tcp", "192.0.2.1", 150, 0, "10.1.0.6"), false, false},
		{newPort("tcp", "", 150, 0, "fd00::6"), false, false},
	} {
		if of.Overlaps(c.p) != c.overlaps || c.p.Overlaps(of) != c.overlaps || index.Overlap(c.p, "") != c.overlaps ||
			index.Covers(c.p) != c.covers {
			t.Errorf("%s, to %s", c.p, c.p.To)
		}
		if index.Overlap(c.p, "a") {
			t.Errorf("%s overlaps an excepted port", c.p)
		}
	}
}

// MinRange or more consecutive ports become a range, and splitting it returns the original list.
func TestRanges(t *testing.T) {
	var list []Port
	for i := range uint16(MinRange) {
		list = append(list, newPort("tcp", "", 1000+i, 0, "10.1.0.5"))
	}
	joined := Ranges(append([]Port{newPort("tcp", "", 80, 0, "10.1.0.5")}, list...))
	if got := Names(joined); got != fmt.Sprintf("tcp 80, tcp 1000-%d", 999+MinRange) {
		t.Errorf("got %s", got)
	}
	if got, want := Names(Singles(joined[1:])), Names(list); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if got := Names(Ranges(list[1:])); got != Names(list[1:]) {
		t.Errorf("too few: %s", got)
	}
}

func TestAddress(t *testing.T) {
	for p, want := range map[Port]string{
		newPort("sctp", "", 1, 0, "10.1.0.5"): "0.0.0.0 132", newPort("udp", "", 1, 0, "fd00::5"): ":: 17",
		newPort("tcp", "192.0.2.1", 1, 0, "10.1.0.5"): "192.0.2.1 6",
	} {
		if got := fmt.Sprint(p.Address(), " ", p.Number()); got != want {
			t.Errorf("%s: got %s, want %s", p, got, want)
		}
	}
}

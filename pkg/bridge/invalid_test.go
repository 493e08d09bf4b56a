// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/iptables"
)

// tcp returns a frame with a TCP segment that has these flags and no data.
func tcp(to, from net.HardwareAddr, src, dst netip.Addr, flags byte) []byte {
	segment := slices.Concat(be(1000), be(2000), []byte{0, 0, 0, 1, 0, 0, 0, 1, 0x50, flags}, be(1024), be(0), be(0))
	copy(segment[16:], checksum(src.AsSlice(), dst.AsSlice(), []byte{0, unix.IPPROTO_TCP}, be(uint16(len(segment))), segment))
	if src.Is6() {
		return ip6(to, from, src, dst, unix.IPPROTO_TCP, segment)
	}
	frame := ip4(to, from, src, dst, unix.IPPROTO_TCP, 0, nil, segment)
	frame[22] = 64 // hops
	copy(frame[24:], []byte{0, 0})
	copy(frame[24:], checksum(frame[14:34]))
	return frame
}

// TestInvalidStaysInside: packets that belong to no connection, which the kernel does not masquerade, do not leave with the pod's address
// where the network masquerades. They pass to destinations that it excepts, with both backends.
func TestInvalidStaysInside(t *testing.T) {
	excepted := object{"nonMasqueradeCIDRs": []string{"203.0.113.0/24", "2001:db8:113::/64"}}
	for name, c := range map[string]struct {
		backend string
		masq    any
		leaves  bool
	}{
		"nftables": {"nftables", true, false}, "nftables, excepted": {"nftables", excepted, true}, "no masquerade": {"nftables", false, true},
		"iptables": {"iptables", true, false}, "iptables, excepted": {"iptables", excepted, true},
	} {
		t.Run(name, func(t *testing.T) {
			if c.backend == "iptables" && (!iptables.Installed(true) || !iptables.Installed(false)) {
				t.Skip("SKIPPED: iptables is not installed")
			}
			l := newLab(t, "name", "invalid", "bridge", "btinv", "ipMasq", c.masq, "ipMasqBackend", c.backend)
			lan := attached{lab: l.withLAN()}
			pod := l.add("pod")
			l.OK(pod.check())
			for _, is4 := range []bool{true, false} {
				if got := lan.leavesUnmasqueraded(pod, is4); (len(got) > 0) != c.leaves || c.leaves && len(got) != 4 {
					t.Errorf("IPv4 %t: %q left with the pod's address, want %t", is4, got, c.leaves)
				}
			}
		})
	}
}

// leavesUnmasqueraded returns which TCP segments without a connection arrive at the machine on the uplink with the pod's address.
func (a attached) leavesUnmasqueraded(pod attached, is4 bool) (found []string) {
	a.Helper()
	s, to := pod.station(), netip.MustParseAddr(uplinkAddresses[is4])
	src := map[bool]netip.Addr{true: s.v4, false: s.v6}[is4]
	in, out := a.tap(), pod.tap()
	names := map[byte]string{4: "RST", 20: "RST+ACK", 17: "FIN+ACK", 3: "SYN+FIN"}
	for flags := range names {
		if _, err := unix.Write(out, tcp(pod.bridgeMAC(), s.mac, src, to, flags)); err != nil {
			a.Fatal(err)
		}
	}
	end := udp6
	if is4 {
		end = udp4
	}
	if _, err := unix.Write(out, end(pod.bridgeMAC(), s.mac, src, to, 1000, 2000, "the end")); err != nil {
		a.Fatal(err)
	}
	buf := make([]byte, 2048)
	for {
		n, _, err := harness.ReceiveFrame(in, buf, time.Minute)
		if err != nil {
			a.Fatalf("IPv4 %t: the last packet did not leave: %v", is4, err)
		}
		got := buf[:n]
		if bytes.HasSuffix(got, []byte("the end")) {
			return found
		}
		at, protocol, header := source6, 6, 40
		if is4 {
			at, protocol, header = source4, 9, 20
		}
		if n >= 14+header+20 && got[14+protocol] == unix.IPPROTO_TCP && bytes.Equal(got[14+at:14+at+len(src.AsSlice())], src.AsSlice()) {
			found = append(found, names[got[14+header+13]])
		}
	}
}

// TestInvalidRulesComeBack: CHECK reports the missing rules against packets without a connection, and STATUS and GC bring them back.
func TestInvalidRulesComeBack(t *testing.T) {
	gone := map[string]string{"nftables": "for c in $(nft list chains inet | grep -o 'invalid-[0-9a-f]*'); do nft delete chain inet podlace_masquerade $c; done",
		"iptables": "iptables -t mangle -F; iptables -t mangle -X; ip6tables -t mangle -F; ip6tables -t mangle -X"}
	for backend, flushes := range map[string][]string{
		"nftables": {"nft flush chain inet podlace_masquerade $(nft list chains inet | grep -o 'invalid-[0-9a-f]*')"},
		"iptables": {"iptables -t mangle -F", "ip6tables -t mangle -F"},
	} {
		t.Run(backend, func(t *testing.T) {
			if backend == "iptables" && (!iptables.Installed(true) || !iptables.Installed(false)) {
				t.Skip("SKIPPED: iptables is not installed")
			}
			l := newLab(t, "name", "invalidrules", "bridge", "btinr", "ipMasqBackend", backend)
			a := l.add("a")
			for _, flush := range flushes {
				a.mustBeRestoredBy("STATUS", flush)
				a.mustBeRestoredBy("GC", flush, "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}})
			}
			l.run(gone[backend]) // as after an upgrade from a version without these rules
			if o := l.OK(a.check()); !strings.Contains(o.Log, "packets of no connection may leave") {
				t.Errorf("CHECK does not warn: %s", o.Log)
			}
			l.OK(l.Call("STATUS", ""))
			if o := l.OK(a.check()); strings.Contains(o.Log, "packets of no connection") {
				t.Errorf("STATUS did not restore the chain: %s", o.Log)
			}
		})
	}
	kerneltest.Must(t, kerneltest.FlushNFT())
}

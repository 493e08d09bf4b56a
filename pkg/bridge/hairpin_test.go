// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/nft"
)

// copiesUntil reads what a tap receives from others, up to a frame that is last or ends with it. It counts the copies of each of the
// frames.
func (l lab) copiesUntil(tap int, last []byte, frames ...frame) map[string]int {
	l.Helper()
	copies, buf := map[string]int{}, make([]byte, 2048)
	for {
		n, from, err := harness.ReceiveFrame(tap, buf, time.Minute)
		if err != nil {
			l.Fatalf("the last frame did not arrive: %v", err)
		}
		if at, ok := from.(*unix.SockaddrLinklayer); ok && at.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		if bytes.HasSuffix(buf[:n], last) {
			return copies
		}
		for _, f := range frames {
			if bytes.Equal(buf[:n], f.bytes) {
				copies[f.what]++
			}
			if copies[f.what] > 100 {
				return copies // it circles
			}
		}
	}
}

func (a attached) send(frames ...[]byte) {
	a.Helper()
	out := a.tap()
	for _, f := range frames {
		if _, err := unix.Write(out, f); err != nil {
			a.Fatal(err)
		}
	}
}

// TestNoStorm: a tenant reflects all frames by a bridge in the pod. With hairpinMode, the pod's port nevertheless gets none of its own
// broadcasts and multicasts back, which would otherwise circle and reach every neighbour again and again; with spoof protection, also no
// frames to unknown MACs. It still gets frames to its own MAC, with which it reaches its own hostPort, and without spoof protection to any
// other MAC behind it, such as that of a macvlan.
func TestNoStorm(t *testing.T) {
	for name, keys := range map[string][]any{"nothing": nil, "macspoofchk": {"macspoofchk", true}, "antiSpoof": {"antiSpoof", true}} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t, append([]any{"name", "storm", "bridge", "btstorm"}, keys...)...)
			tenant, neighbour := l.add("tenant"), l.other().add("neighbour")
			m, v := tenant.station(), neighbour.station()
			kerneltest.Must(t, tenant.runInPod(`ip link add loop type bridge; ip link set eth0 master loop
				bridge link set dev eth0 hairpin on learning off; ip link set loop up`))
			defer func() { kerneltest.Must(t, tenant.runInPod("ip link del loop")) }()
			unknown, group := net.HardwareAddr{2, 0, 0x5e, 0, 0x53, 9}, netip.MustParseAddr("239.1.2.3")
			frames := []frame{
				{"broadcast", always, arpFrame(net.HardwareAddr{255, 255, 255, 255, 255, 255}, m.mac, 1, m.mac, m.v4, v.v4)},
				{"multicast", always, udp4(groupMAC(group), m.mac, m.v4, group, 1, 2, "group")},
			}
			own := frame{"own MAC", always, udp4(m.mac, m.mac, m.v4, m.v4, 1, 2, "own")}
			if name == "nothing" {
				own = frame{"MAC of a macvlan", always, udp4(unknown, unknown, m.v4, m.v4, 1, 2, "own")}
			} else {
				frames = append(frames, frame{"unknown unicast", always, udp4(unknown, m.mac, m.v4, v.v4, 1, 2, "unknown")})
			}
			frames = append(frames, own)
			in, back := neighbour.tap(), tenant.tap()
			for _, f := range frames {
				tenant.send(f.bytes)
			}
			end, answer := udp4(v.mac, m.mac, m.v4, v.v4, 1, 2, "end"), udp4(m.mac, v.mac, v.v4, m.v4, 1, 2, "end")
			tenant.send(end)
			neighbour.send(answer)
			there, here := l.copiesUntil(in, end, frames...), l.copiesUntil(back, answer, frames...)
			for i, f := range frames {
				if back := i == len(frames)-1; back && here[f.what] == 0 {
					t.Errorf("%s: it did not come back", f.what)
				} else if !back && (there[f.what] != 1 || here[f.what] > 0) {
					t.Errorf("%s: the neighbour got %d, want 1; %d came back, want 0", f.what, there[f.what], here[f.what])
				}
			}
			l.OK(tenant.check())
		})
	}
}

// TestStormRulesComeBack: CHECK warns of missing rules of a port with hairpinMode and without spoof protection, STATUS and the next ADD
// bring them back, and DEL removes the port's elements.
func TestStormRulesComeBack(t *testing.T) {
	l := newLab(t, "name", "stormrules", "bridge", "btrules", "ipMasq", false)
	a := l.add("a")
	l.OK(a.check())
	for name, verb := range map[string]func(){"STATUS": func() { l.OK(l.Call("STATUS", "")) }, "ADD": func() { l.other().add("b") }} {
		kerneltest.Must(t, kerneltest.FlushNFT())
		if o := l.OK(a.check()); !strings.Contains(o.Log, "up to date") {
			t.Errorf("CHECK does not warn: %s", o.Log)
		}
		verb()
		if o := l.OK(a.check()); strings.Contains(o.Log, "up to date") {
			t.Errorf("after %s: %s", name, o.Log)
		}
	}
	l.OK(l.Call("DEL", "a"))
	h, err := nft.Open(nft.GuardTable)
	kerneltest.Must(t, err)
	defer h.Close()
	left, err := h.Existing([]nft.Element{{Set: "hairpin", Key: nft.Key(nft.IfName(a.hostVeth()), nft.IfName(a.hostVeth()))}})
	if err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
	link, _, err := l.host().Link(l.other().add("c").hostVeth())
	if err != nil || link.Reserved {
		t.Errorf("a port without spoof protection forwards reserved frames: %t, %v", link.Reserved, err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// TestMakePlan checks who keeps a port, who loses it and who makes the ADD fail, if container "new" of pod shop/web-0 requests ports
// (F-39).
func TestMakePlan(t *testing.T) {
	of := func(container, pod string) attachment.Record {
		return attachment.Record{Key: attachment.Key{Network: "net", ContainerID: container, IfName: "eth0"}, Pod: pod}
	}
	long := ports.Port{Protocol: "tcp", Port: 80, Last: 99, To: netip.MustParseAddrPort("10.1.0.5:80")}
	single, other := portFrom("tcp 80 10.1.0.6:80"), portFrom("tcp 90 10.1.0.6:90")
	single.SNAT, other.SNAT = false, false
	for title, c := range map[string]struct {
		held  []ports.Port // ports of another owner
		own   []ports.Port // existing ports of the claim's owner
		by    portHolder
		taken bool // forwarded by the iptables backend
		asks  ports.Port

		remove, add string
		former      string
		heirs       bool
		singles     bool
		code        uint
		says        string
	}{
		"free":    {asks: single, add: "owners ports4 80"},
		"its own": {own: []ports.Port{single}, asks: single, remove: "ports4 80", add: "owners ports4 80"},
		"same container": {held: []ports.Port{single}, by: portHolder{Record: of("new", "shop/web-0"), found: true}, asks: single,
			remove: "ports4 80", add: "ports4 80 owners", heirs: true},
		"range of the same": {held: []ports.Port{long}, by: portHolder{Record: of("new", ""), found: true}, asks: long,
			remove: "ranges4 80-99", add: "ranges4 80-99 owners", heirs: true},
		"port in a range": {held: []ports.Port{long}, by: portHolder{Record: of("new", ""), found: true}, asks: single,
			remove: "ranges4 80-99", add: "ranges4 80-99 owners", heirs: true},
		"range over a port": {held: []ports.Port{single}, by: portHolder{Record: of("new", ""), found: true}, asks: long,
			remove: "ports4 80", add: "ports4 80 owners", heirs: true, singles: true},
		"older pod": {held: []ports.Port{single},
			by: portHolder{Record: of("old", "shop/web-0"), found: true, all: []recordedPorts{{Record: of("old", "")}}}, asks: single,
			remove: "ports4 80", add: "owners ports4 80", former: "old", heirs: true},
		"dead container": {held: []ports.Port{single}, by: portHolder{Record: of("old", "shop/web-1"), found: true, gone: true,
			all: []recordedPorts{{Record: of("old", "")}}, elements: elementsOf(other, ownerB)}, asks: single,
			remove: "ports4 90 ports4 80", add: "owners ports4 80", former: "old"},
		"another pod": {held: []ports.Port{single}, by: portHolder{Record: of("old", "shop/web-1"), found: true}, asks: single,
			code: plugin.CodePortConflict, says: "hostPort tcp 80 is in use by shop/web-1, container old, since "},
		"pods without names": {held: []ports.Port{single}, by: portHolder{Record: of("old", ""), found: true}, asks: single,
			code: plugin.CodePortConflict, says: "hostPort tcp 80 is in use by container old, since "},
		"record lost": {held: []ports.Port{single}, by: portHolder{}, asks: single, code: plugin.CodePortConflict,
			says: "hostPort tcp 80 is in use by shop/web-1"},
		"record lost and dead": {held: []ports.Port{single}, by: portHolder{gone: true}, asks: single, remove: "ports4 80", add: "owners ports4 80"},
		"range of the dead": {held: []ports.Port{long}, by: portHolder{gone: true}, asks: single, remove: "ranges4 80-99",
			add: "owners ports4 80"},
		"iptables of the dead": {held: []ports.Port{single}, taken: true, by: portHolder{gone: true}, asks: single, remove: "taken4 80",
			add: "owners ports4 80"},
		"iptables, shared": {held: []ports.Port{single}, taken: true, by: portHolder{Record: of("new", ""), found: true}, asks: single,
			remove: "taken4 80", add: "taken4 80 owners", heirs: true},
	} {
		t.Run(title, func(t *testing.T) {
			have := portConflicts{holders: map[string]portHolder{ownerHash(ownerB): c.by}}
			for _, e := range slices.Concat(ownedPorts{Owner: ownerB, ByIPTables: c.taken, Ports: c.held}.elements(),
				ownedPorts{Owner: ownerA, Ports: c.own}.elements()) {
				if e.Set != "owners" { // one lookup covers the ports
					have.elements = append(have.elements, e)
				}
			}
			p, err := makePlan(have, portClaim{ownedPorts{Owner: ownerA, Ports: []ports.Port{c.asks}}, "new", "shop/web-0"})
			if c.code != 0 {
				if plugin.Code(err) != c.code || !strings.Contains(err.Error(), c.says) {
					t.Errorf("got %v", err)
				}
				return
			}
			want := fmt.Sprint(c.remove, "|", c.add, "|", c.former, "|", c.heirs, c.singles)
			got := fmt.Sprint(nameElements(p.remove), "|", nameElements(p.add), "|", containers(p.displacedAttachments()), "|",
				slices.ContainsFunc(p.add, mayPass), p.singles)
			if diff := cmp.Diff(want, got); diff != "" || err != nil {
				t.Errorf("%v\n%s", err, diff)
			}
		})
	}
}

// An attachment that loses many ports is once in the plan, and so is each of its set elements.
func TestMakePlanOnce(t *testing.T) {
	rec := attachment.Record{Key: attachment.Key{ContainerID: "old"}, Pod: "shop/web-0"}
	list := portList("tcp 80 10.1.0.6:80", "tcp 81 10.1.0.6:81")
	var held []nft.Element
	for _, p := range list {
		held = append(held, elementsOf(p, ownerB)...)
	}
	by := portHolder{Record: rec, found: true, gone: true, all: []recordedPorts{{Record: rec}}, elements: slices.Clone(held)}
	want := portClaim{ownedPorts{Owner: ownerA, Ports: list}, "new", "shop/web-0"}
	p, err := makePlan(portConflicts{held, map[string]portHolder{ownerHash(ownerB): by}}, want)
	if err != nil || len(p.taken) != 1 || len(p.displacedAttachments()) != 1 || len(p.remove) != len(held) {
		t.Errorf("%+v, %v", p, err)
	}
}

// A plan that is outdated by another program fails without taking a port; the plan of a repeated ADD succeeds.
func TestStalePlan(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	log := slog.New(slog.DiscardHandler)
	want := portClaim{ownedPorts{Owner: ownerA, Ports: portList("tcp 80 10.1.0.5:80")}, "a", ""}
	kerneltest.Must(t, ensureRules(h, log))
	add, del := func() error { return addAll(h, want.ownedPorts) }, func() error { return delHostPorts(h, want.ownedPorts) }
	for _, change := range []func() error{add, del} {
		p, err := planFor(h, want)
		kerneltest.Must(t, err, change())
		if err := applyPlan(h, want, p); err == nil {
			t.Error("the stale plan succeeded")
		}
		p, err = planFor(h, want)
		kerneltest.Must(t, err, applyPlan(h, want, p), checkPorts(h, ownerA, want.Ports))
	}
}

func containers(all []recordedPorts) string {
	var out []string
	for _, rec := range all {
		out = append(out, rec.ContainerID)
	}
	return strings.Join(out, " ")
}

// nameElements returns the set and port of each element.
func nameElements(elements []nft.Element) string {
	var out []string
	for _, e := range elements {
		out = append(out, e.Set)
		if isForward(e) {
			_, port, _ := strings.Cut(portOf(e).String(), " ")
			out = append(out, port)
		}
	}
	return strings.Join(out, " ")
}

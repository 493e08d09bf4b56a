// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
)

// steps returns an agent whose main loop does not run, for calls of step. list passes it a complete list of nodes.
func (l *lab) steps() (a *agent, list func(ids ...int)) {
	l.Helper()
	c, err := readConfig(l.Config)
	kerneltest.Must(l, err)
	a = newAgent(l.options, c, slog.New(slog.NewTextHandler(l.log, nil)))
	return a, func(ids ...int) {
		var all []any
		for _, id := range ids {
			all = append(all, l.peer(id))
		}
		kerneltest.Must(l, a.nodes.Replace(all, ""))
	}
}

func because(why cause) map[cause]bool { return map[cause]bool{why: true} }

// mustWait calls a.step until the agent requests a pause, and fails the test if it never does, because such a loop would use up a core. The
// pause has only a lower limit here, since the machine may be slow.
func (l *lab) mustWait(what string, a *agent, why cause) {
	l.Helper()
	for range 20 {
		switch wait := time.Until(a.step(because(why))); {
		case wait > time.Minute:
			l.Errorf("%s: the next step comes after %v", what, wait)
			return
		case wait > 0:
			return
		}
		why = onLook
	}
	l.Errorf("%s: 20 steps without a pause", what)
}

// TestHeldDeletions: while its own Node object is missing, the agent deletes no routes and pauses between comparisons. When the object is
// back, a deletion of more than half of the routes is still delayed: after a restore of etcd, for example, nodes may return one by one.
func TestHeldDeletions(t *testing.T) {
	l := newLab(t)
	l.times.trustDelay = 200 * time.Millisecond
	a, list := l.steps()
	list(1, 2, 3)
	a.step(because(onStart))
	l.has(full(2, 3))
	list()
	for range 3 {
		l.mustWait("own node gone", a, onAPI)
		time.Sleep(l.times.trustDelay)
	}
	if l.mustWait("later", a, onLook); !a.deletionsHeld {
		t.Error("deletions are not held back")
	}
	list(1)
	a.step(because(onAPI))
	if got := l.routes(); !slices.Equal(got, full(2, 3)) {
		t.Errorf("routes %q: deleted as soon as the own node was back", got)
	}
	time.Sleep(l.times.trustDelay)
	if a.step(because(onLook)); a.deletionsHeld || !slices.Equal(l.routes(), full()) {
		t.Errorf("held %t, routes %q", a.deletionsHeld, l.routes())
	}
}

// TestSuspicionStands: a list with many new nodes lacks the old ones. Their routes stay, because the list could be another cluster's.
func TestSuspicionStands(t *testing.T) {
	l := newLab(t)
	a, list := l.steps()
	list(1, 2, 3)
	a.step(because(onStart))
	list(1, 4, 5, 6, 7)
	for range 3 {
		a.step(because(onAPI))
	}
	if got := l.routes(); !a.deletionsHeld || !slices.Equal(got, full(2, 3, 4, 5, 6, 7)) {
		t.Errorf("held %t, routes %q", a.deletionsHeld, got)
	}
	list(1, 2, 4, 5, 6, 7) // one of the two is missing
	if a.step(because(onAPI)); a.deletionsHeld || !slices.Equal(l.routes(), full(2, 4, 5, 6, 7)) {
		t.Errorf("held %t, routes %q", a.deletionsHeld, l.routes())
	}
}

// TestHeldExceptions: while a suspicious list keeps old routes alive, the clusterCIDRs in node.json contain the CIDRs of old and new nodes,
// also if the first list after the start is the suspicious one.
func TestHeldExceptions(t *testing.T) {
	l := newLab(t)
	const configured = `"clusterCIDRs": ["10.244.0.0/16", "fd00:10:244::/56"], `
	l.put("config/config.json", strings.Replace(l.read("config/config.json"), configured, "", 1))
	l.times.trustDelay = time.Hour
	has := func(when string, ids ...int) {
		t.Helper()
		for _, id := range ids {
			addr := netip.MustParseAddr(fmt.Sprintf("10.244.%d.9", id))
			if cidrs := l.node().ClusterCIDRs; !slices.ContainsFunc(cidrs, func(p netip.Prefix) bool { return p.Contains(addr) }) {
				t.Errorf("%s: pods of n%d are masqueraded: %v", when, id, cidrs)
			}
		}
	}
	a, list := l.steps()
	list(1, 2, 3, 5)
	a.step(because(onStart))
	has("at the start", 1, 2, 3, 5)
	list(1, 4) // the list lacks all other nodes
	a.step(because(onAPI))
	a.step(because(onAPI))
	if has("a suspicious list", 1, 2, 3, 4, 5); !a.deletionsHeld {
		t.Error("the list is believed")
	}
	a, list = l.steps()
	list(1, 4)
	a.step(because(onStart))
	if has("the agent starts with it", 1, 2, 3, 4, 5); !a.deletionsHeld {
		t.Error("the list is believed")
	}
	list(2, 3)
	a.step(because(onAPI))
	has("the own node is gone, too", 1, 2, 3, 4, 5)
	list(1, 4)
	a.times.trustDelay = 0
	a.step(because(onAPI))
	a.step(because(onAPI))
	if got := fmt.Sprint(l.node().ClusterCIDRs); a.deletionsHeld || got != "[10.244.1.0/24 10.244.4.0/24 fd00:10:244:1::/64 fd00:10:244:4::/64]" {
		t.Errorf("held %t, %s", a.deletionsHeld, got)
	}
}

// TestBusyFolder: frequent file changes in a runtime's folder do not prevent the retry of a failed route.
func TestBusyFolder(t *testing.T) {
	l := newLab(t)
	free := l.blockNexthop("n2")
	a, list := l.steps()
	list(1, 2, 3)
	a.step(because(onStart))
	free()
	a.retryAt = time.Now()
	a.step(because(onFiles))
	l.has(full(2, 3))
}

// TestFirstFile: even many failures delay the first node.json by at most firstFileDelay.
func TestFirstFile(t *testing.T) {
	l := newLab(t)
	l.times.firstFileDelay = time.Second
	l.blockNexthop("n2")
	a, list := l.steps()
	list(1, 2, 3)
	a.retry, a.retryAt = mostRetry, time.Now().Add(mostRetry)
	if wait := time.Until(a.step(because(onStart))); wait > l.times.firstFileDelay {
		t.Errorf("the next step comes after %v", wait)
	}
	time.Sleep(l.times.firstFileDelay)
	if l.mustWait("late", a, onLook); l.node().PodCIDRs == nil {
		t.Error("no node.json")
	}
}

// TestForeignRouteGoes: a conflicting route of another program disappears. The agent soon adds its own, although the kernel sends no event.
func TestForeignRouteGoes(t *testing.T) {
	l := newLab(t)
	link, err := netlink.LinkByName("up0")
	kerneltest.Must(t, err)
	route := &netlink.Route{Dst: kernel.IPNet(netip.MustParsePrefix("10.244.2.0/24")), LinkIndex: link.Attrs().Index,
		Gw: []byte{192, 0, 2, 254}, Protocol: unix.RTPROT_STATIC}
	kerneltest.Must(t, netlink.RouteAdd(route))
	l.times.conflictPause = 200 * time.Millisecond
	a, list := l.steps()
	list(1, 2, 3)
	if wait := time.Until(a.step(because(onStart))); wait > l.times.conflictPause || slices.Contains(l.routes(), "10.244.2.0/24 192.0.2.2") {
		t.Errorf("the next step comes after %v; routes %q", wait, l.routes())
	}
	kerneltest.Must(t, netlink.RouteDel(route))
	time.Sleep(l.times.conflictPause)
	a.step(because(onLook))
	l.has(full(2, 3))
	if usualTimes().conflictPause > 10*time.Second {
		t.Error("an administrator waits for this")
	}
}

// TestPluginsFirst: the plugins are installed before the conflist is written. An older plugin, or another file with its name, does not
// count.
func TestPluginsFirst(t *testing.T) {
	l := newLab(t)
	blocked := filepath.Join(l.dir, "bin/podlace-bridge")
	kerneltest.Must(t, os.MkdirAll(blocked+"/full", 0o755))
	l.put("net.d/"+conflistName, "the one before")
	a, list := l.steps()
	list(1, 2, 3)
	a.step(because(onStart))
	if l.read("net.d/"+conflistName) != "the one before" || a.ready {
		t.Errorf("conflist %q, ready %t", l.read("net.d/"+conflistName), a.ready)
	}
	kerneltest.Must(t, os.RemoveAll(blocked))
	if a.step(because(onFiles)); l.read("net.d/"+conflistName) != testConflist || !a.ready {
		t.Errorf("conflist %q, ready %t", l.read("net.d/"+conflistName), a.ready)
	}
}

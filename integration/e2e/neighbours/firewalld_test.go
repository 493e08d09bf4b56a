// SPDX-License-Identifier: Apache-2.0

package neighbours

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
)

// flushed is what fails without masquerade and rules of hostPorts.
var flushed = []string{"pod to outside", "outside to hostPort", "pod to hostPort", "node to hostPort", "node to hostPort at 127.0.0.1"}

// eachBackend runs a test with rules of Podlace in nftables and iptables, and firewalld with each of its backends. lost is what fails after
// firewalld has flushed the tables of iptables, which both of its backends do: nothing if Podlace's rules are in nftables.
func eachBackend(t *testing.T, test func(l *lab, backend string, lost []string)) {
	for conflist, lost := range map[string][]string{byNftables: nil, byIPTables: flushed} {
		for _, backend := range []string{"nftables", "iptables"} {
			t.Run(conflist+", firewalld with "+backend, func(t *testing.T) { test(newLab(t, conflist), backend, lost) })
		}
	}
}

// TestFirewalldZone: a bridge in no zone is in firewalld's default zone, which rejects what pods send to each other and to the node, and
// also to the outside unless a zone has the uplink. The documented command, which doctor prints too, ends this without a reload.
func TestFirewalldZone(t *testing.T) {
	eachBackend(t, func(l *lab, backend string, lost []string) {
		l.addPods()
		l.fails("without firewalld")
		l.startFirewalld(backend)
		l.fails("firewalld started after the pods", append([]string{"pod to pod", "pod to outside", "pod to node"}, lost...)...)
		l.podlace("reload")
		l.fails("podlace reload", "pod to pod", "pod to outside", "pod to node")
		harness.Shell(l, "firewall-cmd --zone=public --add-interface=eth0") // as NetworkManager does
		l.fails("the uplink has a zone", "pod to pod", "pod to node")
		commands := documented(l.T, "firewall-cmd")
		var unit []string
		if lost != nil {
			unit = []string{"install -m 644 conf/podlace-reload.service /etc/systemd/system/; " +
				"systemctl enable podlace-reload.service; systemctl restart podlace-reload.service"}
		}
		l.advises(append(commands, unit...)...)
		harness.Shell(l, commands[0])
		l.fails("the bridge is in the zone trusted")
		l.advises(unit...)
	})
}

// TestFirewalldFlush: each reload, stop and start of firewalld takes the rules of Podlace's iptables backend away, and none of its nftables
// backend. `podlace reload` restores them.
func TestFirewalldFlush(t *testing.T) {
	eachBackend(t, func(l *lab, backend string, lost []string) {
		l.addPods()
		firewalld := l.startFirewalld(backend)
		harness.Shell(l, documented(l.T, "firewall-cmd")[0])
		for _, event := range firewalldEvents(firewalld) {
			l.podlace("reload")
			l.fails("before " + event.name)
			event.do()
			l.fails(event.name, lost...)
		}
		l.podlace("reload")
		l.fails("at the end")
	})
}

type event struct {
	name string
	do   func()
}

func firewalldEvents(firewalld *daemon) []event {
	shell := func(line string) event { return event{line, func() { harness.Shell(firewalld, line) }} }
	return []event{
		shell("firewall-cmd --reload"), shell("firewall-cmd --complete-reload"), {"a restart", firewalld.restart}, {"a stop", firewalld.stop},
		{"a start", firewalld.start},
	}
}

// TestFirewalldFirst: firewalld has the bridge in its zone before the bridge exists, as after a boot. ADD then needs nothing else.
func TestFirewalldFirst(t *testing.T) {
	eachBackend(t, func(l *lab, backend string, _ []string) {
		permanent, _, _ := strings.Cut(documented(l.T, "firewall-cmd")[0], ";")
		firewalld := l.startFirewalld(backend)
		harness.Shell(l, permanent)
		firewalld.restart()
		l.addPods()
		l.fails("pods after firewalld")
	})
}

// TestFirewalldHealed: `podlace reload --watch` restores what firewalld flushes, without a call of a runtime.
func TestFirewalldHealed(t *testing.T) {
	eachBackend(t, func(l *lab, backend string, lost []string) {
		l.addPods()
		firewalld := l.startFirewalld(backend)
		harness.Shell(l, documented(l.T, "firewall-cmd")[0])
		log := filepath.Join(l.TempDir(), "watch.log")
		l.startDaemon("grep -q watching "+log, "sh", "-c", "exec "+filepath.Join(harness.BinDir(), "podlace")+" reload --watch 2>>"+log)
		for _, event := range firewalldEvents(firewalld) {
			event.do()
			harness.Await(l, "all connections after "+event.name, func() bool { return len(l.failing(0, nil)) == 0 })
		}
		text, err := os.ReadFile(log)
		kerneltest.Must(l, err)
		if repairs := strings.Count(string(text), "restored"); (repairs > 0) != (lost != nil) {
			l.Errorf("%d repairs:\n%s", repairs, text)
		}
		l.Logf("log of the watch:\n%s", text)
	})
}

// advises compares the commands that doctor prints for firewalls with the wanted ones.
func (l *lab) advises(want ...string) {
	l.Helper()
	if diff := cmp.Diff(append([]string{}, want...), append([]string{}, l.advice()...)); diff != "" {
		l.Errorf("doctor's commands (-want +got):\n%s", diff)
	}
}

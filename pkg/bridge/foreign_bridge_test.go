// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// TestForeignBridgeKeepsSettings: ADD and Restore change no setting of a bridge that another program made, such as accept_ra=2, without
// which a node whose uplink is a port of the bridge loses its default route. Restore does not set it up either.
func TestForeignBridgeKeepsSettings(t *testing.T) {
	l := bareLab(t, "name", "lan", "bridge", "btlan0", "ipam", hostLocal("10.35.0.0/24", "fd00:35::/64"))
	l.run("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1; ip link add btlan0 address 02:00:00:00:00:77 type bridge; " +
		"sysctl -qw net.ipv6.conf.btlan0.accept_ra=2 net.ipv6.conf.btlan0.accept_dad=1 net.ipv4.conf.btlan0.forwarding=1; ip link set btlan0 up")
	t.Cleanup(func() { l.run("ip link del btlan0") })
	host, err := kernel.Host()
	kerneltest.Must(t, err)
	defer host.Close()
	settings := func() string {
		return l.run("sysctl -a 2>/dev/null | grep -F .btlan0.; cd /sys/class/net/btlan0; for f in bridge/[a-z]* mtu flags address; do " +
			"case $f in *timer|*topology*|*id|*flush) ;; *) echo $f $(cat $f);; esac; done")
	}
	before := settings()
	a := l.add("a")
	if after := settings(); after != before {
		t.Errorf("ADD changes the bridge: %s", changes(before, after))
	}
	a.mustReachGateway()
	l.run("ip link set btlan0 down")
	before = settings()
	kerneltest.Must(t, Restore(host, slog.Default(), attachment.Waiting))
	if after := settings(); after != before {
		t.Errorf("Restore changes the bridge: %s", changes(before, after))
	}
}

// changes returns the lines of after that before lacks.
func changes(before, after string) (lines []string) {
	for line := range strings.Lines(after) {
		if !strings.Contains(before, line) {
			lines = append(lines, line)
		}
	}
	return lines
}

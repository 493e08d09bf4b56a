// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"log/slog"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// TestFlushedForwardingDatabase: after 'bridge fdb flush' the bridge sends frames for its own MAC to the ports, so no pod reaches its
// gateway. CHECK reports that, and STATUS, Restore and the ADD of another pod end it.
func TestFlushedForwardingDatabase(t *testing.T) {
	l := newLab(t, "name", "flushed", "bridge", "btflush0", "ipam", hostLocal("10.33.0.0/24", "fd00:33::/64"))
	a := l.add("a")
	host, err := kernel.Host()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	for name, restore := range map[string]func(){
		"STATUS":  func() { l.OK(l.Call("STATUS", "")) },
		"Restore": func() { kerneltest.Must(t, Restore(host, slog.Default(), attachment.Waiting)) },
		"ADD":     func() { l.other().add("b").mustReachGateway() },
	} {
		t.Run(name, func(t *testing.T) {
			a.mustReachGateway()
			l.run("bridge fdb flush dev btflush0")
			a.Fails(a.check(), plugin.CodeStateDiffers, "forwarding database")
			restore()
			a.OK(a.check())
			a.mustReachGateway()
		})
	}
}

// TestMACOfAPort: a bridge whose MAC is that of a port needs no entry of its own.
func TestMACOfAPort(t *testing.T) {
	l := bareLab(t, "name", "macofport", "bridge", "btport0", "ipam", hostLocal("10.34.0.0/24"))
	l.run("ip link add btport0 type bridge; ip link add btp0 type veth peer btp1; ip link set btp0 master btport0 up; ip link set btp1 up")
	t.Cleanup(func() { l.run("ip link del btp0; ip link del btport0") })
	a := l.add("a")
	if o := a.OK(l.Call("STATUS", "")); o.Log != "" {
		t.Error(o.Log)
	}
	a.OK(a.check())
	a.mustReachGateway()
}

// mustReachGateway expects the node to refuse a connection from the pod to each gateway address.
func (a attached) mustReachGateway() {
	a.Helper()
	for _, ip := range a.result.IPs {
		if err := a.Pod.Do(func() error {
			_, err := net.DialTimeout("tcp", net.JoinHostPort(ip.Gateway.String(), "9"), time.Minute)
			return err
		}); !errors.Is(err, unix.ECONNREFUSED) {
			a.Errorf("gateway %s: %v, want a refusal", ip.Gateway, err)
		}
	}
}

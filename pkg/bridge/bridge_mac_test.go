// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/plugin"
)

// addForeignBridge creates a bridge as 'ip link add' does, so that its MAC is the lowest of its ports.
func addForeignBridge(t *testing.T, name string) {
	t.Helper()
	t.Cleanup(func() { _ = onHost(name, netlink.LinkDel) })
	if err := errors.Join(netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}),
		onHost(name, netlink.LinkSetUp)); err != nil {
		t.Fatal(err)
	}
}

// foreignLab returns a node with a network on another program's bridge.
func foreignLab(t *testing.T, name string, keys ...any) lab {
	t.Helper()
	l := bareLab(t, append([]any{"name", name, "bridge", name}, keys...)...)
	addForeignBridge(t, name)
	return l
}

// addPort adds a port with a lower MAC than all others to a bridge, as another program could do.
func addPort(t *testing.T, bridge string) (del func()) {
	t.Helper()
	master, err := netlink.LinkByName(bridge)
	if err != nil {
		t.Fatal(err)
	}
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "foreign0", MasterIndex: master.Attrs().Index,
		HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1}},
		PeerName: "foreign1"}
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = onHost("foreign0", netlink.LinkDel) })
	return func() {
		if err := onHost("foreign0", netlink.LinkDel); err != nil {
			t.Fatal(err)
		}
	}
}

// TestForeignBridgeKeepsMAC: from the first ADD on, another program's bridge keeps its MAC when ports join and leave. Each result has it.
func TestForeignBridgeKeepsMAC(t *testing.T) {
	kerneltest.Slow(t)
	for name, keys := range map[string][]any{
		"btfgw": nil, "btfno": {"isGateway", false, "ipMasq", false}, "btfl2": {"isGateway", false, "ipMasq", false, "ipam", nil},
	} {
		t.Run(name, func(t *testing.T) {
			l := foreignLab(t, name, keys...)
			delPort := addPort(t, name)
			want := mac(t, name)
			keeps := func(after string) {
				t.Helper()
				if got := mac(t, name); got != want {
					t.Errorf("after %s the bridge has MAC %s, want %s", after, got, want)
				}
			}
			for i := range 8 {
				if i == 2 {
					delPort()
					keeps("DEL of a foreign port")
				}
				id := fmt.Sprint("pod", i)
				a := l.other().add(id)
				keeps("ADD")
				if got := a.result.Interfaces[0].Mac; got != mac(t, name) {
					t.Errorf("the result names MAC %s, the bridge has %s", got, mac(t, name))
				}
				if i%2 == 1 {
					l.OK(a.Call("DEL", id))
					keeps("DEL")
				}
			}
		})
	}
}

// TestVLANGatewayOnForeignBridge: a VLAN's gateway and the bridge below it keep their MACs while pods are attached.
func TestVLANGatewayOnForeignBridge(t *testing.T) {
	l, has := vlanLab(t, "isGateway", true)
	if !has {
		return
	}
	addForeignBridge(t, "btv")
	bridge, gateway := mac(t, "btv"), ""
	for i := range 6 {
		a := l.other().add(fmt.Sprint("pod", i))
		if i == 0 {
			gateway = mac(t, "btv.100")
		}
		got := []string{mac(t, "btv"), a.result.Interfaces[0].Mac, mac(t, "btv.100"), a.result.Interfaces[3].Mac}
		if diff := cmp.Diff([]string{bridge, bridge, gateway, gateway}, got); diff != "" {
			t.Errorf("MACs of bridge and gateway, and by the result: %s", diff)
		}
	}
}

// echo starts a UDP server on an address of the node, which answers until the test ends.
func echo(t *testing.T, address string) (port string) {
	t.Helper()
	conn, err := net.ListenPacket("udp", net.JoinHostPort(address, "0"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	go func() {
		buffer := make([]byte, 64)
		for {
			n, from, err := conn.ReadFrom(buffer)
			if err != nil {
				return
			}
			_, _ = conn.WriteTo(buffer[:n], from)
		}
	}()
	return fmt.Sprint(conn.LocalAddr().(*net.UDPAddr).Port)
}

// exchange sends datagrams from a pod until stop is closed, each after the answer to the one before. The timeout suits slow machines.
func exchange(pod *sandbox.Pod, address string, stop <-chan struct{}) (answered, lost int, err error) {
	var conn net.Conn
	if err = pod.Do(func() error { conn, err = net.Dial("udp", address); return err }); err != nil {
		return 0, 0, err
	}
	defer conn.Close()
	buffer := make([]byte, 64)
	for {
		select {
		case <-stop:
			return answered, lost, nil
		default:
		}
		if _, err := fmt.Fprint(conn, answered+lost); err != nil {
			return answered, lost, err
		}
		_ = conn.SetReadDeadline(time.Now().Add(4 * time.Second))
		if _, err := conn.Read(buffer); err != nil {
			lost++
			continue
		}
		answered++
		time.Sleep(time.Millisecond) // yields the CPU
	}
}

// TestGatewayReachedWhilePodsComeAndGo: no packet between a pod and the node is lost while ports join and leave another program's bridge.
// In the layer 2 network, the test sets the gateway address, as an admin would.
func TestGatewayReachedWhilePodsComeAndGo(t *testing.T) {
	kerneltest.Slow(t)
	for name, keys := range map[string][]any{"btping": nil, "btpingl2": {"isGateway", false, "ipMasq", false, "ipam", nil}} {
		t.Run(name, func(t *testing.T) { testGatewayReached(t, name, keys) })
	}
}

func testGatewayReached(t *testing.T, name string, keys []any) {
	l := foreignLab(t, name, keys...)
	delPort := addPort(t, name)
	stays := l.other()
	a := stays.add("stays")
	gateways := []string{"10.60.0.1", "fd00:60::1"}
	if len(a.result.IPs) == 0 {
		gateways = []string{"10.68.0.1"}
		with := func(prefix string) func(netlink.Link) error {
			return func(link netlink.Link) error { return addAddress(link, prefix) }
		}
		if err := errors.Join(onHost(name, with("10.68.0.1/24")), stays.inPod("eth0", with("10.68.0.2/24"))); err != nil {
			t.Fatal(err)
		}
	}
	stop := make(chan struct{})
	var running sync.WaitGroup
	for _, gateway := range gateways {
		port := echo(t, gateway)
		running.Go(func() {
			if answered, lost, err := exchange(stays.Pod, net.JoinHostPort(gateway, port), stop); lost > 0 || answered == 0 || err != nil {
				t.Errorf("gateway %s: %d packets answered, %d lost, %v", gateway, answered, lost, err)
			}
		})
	}
	for i := range 20 {
		if i == 10 {
			delPort()
		}
		other, id := l.other(), fmt.Sprint("pod", i)
		other.add(id)
		if i%2 == 1 {
			l.OK(other.Call("DEL", id))
		}
	}
	close(stop)
	running.Wait()
	l.OK(a.check())
}

// TestCheckSeesChangedGatewayMAC (C-61): CHECK fails if the pod's neighbour entry has the previous MAC of its gateway, but not without an
// entry or with the new MAC. It ignores the bridge's MAC in prevResult.
func TestCheckSeesChangedGatewayMAC(t *testing.T) {
	l := newLab(t)
	a := l.add("a")
	former := keepMAC(t, "bt0")
	for _, ip := range a.result.IPs {
		gateway := ip.Gateway.String()
		l.mustAnswer(l.Pod, gateway)
		l.OK(a.check())
		if err := setMACTo("bt0", "02:00:00:00:00:66"); err != nil {
			t.Fatal(err)
		}
		l.Fails(a.check(), plugin.CodeStateDiffers, "bt0 has MAC 02:00:00:00:00:66, but the pod sends packets for gateway "+gateway+" to "+former)
		if err := a.forgetNeighbour(gateway); err != nil {
			t.Fatal(err)
		}
		l.OK(a.check())
		l.mustAnswer(l.Pod, gateway)
		l.OK(a.check())
		if err := errors.Join(setMACTo("bt0", former), a.forgetNeighbour(gateway)); err != nil {
			t.Fatal(err)
		}
	}
	stale := strings.ReplaceAll(string(a.prev), former, "02:00:00:00:00:55")
	l.mustAnswer(l.Pod, "10.60.0.1")
	a.prev = []byte(stale)
	l.OK(a.check())
}

// keepMAC returns the MAC of a link and restores it when the test ends.
func keepMAC(t *testing.T, name string) string {
	t.Helper()
	former := mac(t, name)
	t.Cleanup(func() {
		if err := setMACTo(name, former); err != nil {
			t.Error(err)
		}
	})
	return former
}

func setMACTo(name, mac string) error {
	return onHost(name, func(link netlink.Link) error {
		to, err := net.ParseMAC(mac)
		return errors.Join(err, netlink.LinkSetHardwareAddr(link, to))
	})
}

func (l lab) forgetNeighbour(addr string) error {
	return l.inPod("eth0", func(link netlink.Link) error {
		return netlink.NeighDel(&netlink.Neigh{LinkIndex: link.Attrs().Index, IP: net.ParseIP(addr)})
	})
}

// TestEntryOfTenant (C-61): CHECK ignores a stale neighbour entry, which the pod's kernel verifies before use. A tenant can write a
// permanent one, so CHECK's hint must not contain its MAC.
func TestEntryOfTenant(t *testing.T) {
	const tenants = "02:de:ad:be:ef:01"
	l := newLab(t)
	a := l.add("a")
	former := keepMAC(t, "bt0")
	if err := setMACTo("bt0", "02:00:00:00:00:66"); err != nil {
		t.Fatal(err)
	}
	enter := func(state int, to string) {
		t.Helper()
		if err := l.inPod("eth0", func(link netlink.Link) error {
			hw, err := net.ParseMAC(to)
			return errors.Join(err, netlink.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, IP: a.result.IPs[0].Gateway, HardwareAddr: hw,
				State: state}))
		}); err != nil {
			t.Fatal(err)
		}
	}
	enter(netlink.NUD_STALE, former)
	l.OK(a.check())
	enter(netlink.NUD_PERMANENT, tenants)
	o := a.check()
	l.Fails(o, plugin.CodeStateDiffers, "sends packets for gateway")
	if !strings.Contains(o.Failure.Details, "at ADD it had MAC "+former) || strings.Contains(o.Failure.Details, tenants) {
		t.Errorf("hint %q", o.Failure.Details)
	}
}

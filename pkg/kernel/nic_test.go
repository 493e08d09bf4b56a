// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// card is the network card of a test and the namespace of the host.
type card struct {
	kerneltest.NIC
	host  *Node
	netns *os.File
}

type trial struct {
	name string
	run  func(*testing.T, card)
}

func trials() []trial {
	return []trial{{"move", moveVF}, {"name taken there", moveVFTaken}, {"name taken at home", moveVFBack}, {"set in the pod", setInPod},
		{"VF to VF", vfToVF}}
}

// TestNICVeths runs the trials with veths, which have no PF, and which the kernel deletes together with their namespace, instead of VFs.
func TestNICVeths(t *testing.T) {
	for _, trial := range trials() {
		t.Run(trial.name, func(t *testing.T) { trial.run(t, newCard(t, kerneltest.FakeNIC)) })
	}
}

// TestNICReal runs the trials with the VFs of a real card, and those that need a PF.
func TestNICReal(t *testing.T) {
	pf := kerneltest.RealPF(t)
	t.Cleanup(func() { kerneltest.SetNumVFs(t, pf, 0) })
	for _, trial := range append(trials(), trialsWithPF()...) {
		t.Run(trial.name, func(t *testing.T) { trial.run(t, newCard(t, kerneltest.RealNIC)) })
	}
}

func newCard(t *testing.T, nic func(testing.TB, int) kerneltest.NIC) card {
	t.Helper()
	c := card{NIC: nic(t, 2), host: host(t)}
	var err error
	c.netns, err = c.host.File()
	kerneltest.Must(t, err)
	t.Cleanup(func() { c.netns.Close() })
	return c
}

type openPod struct {
	*NS
	pod   *sandbox.Pod
	netns *os.File
	end   func() // deletes the pod; idempotent
}

func newInside(t *testing.T) openPod {
	t.Helper()
	p := openPod{pod: kerneltest.NewPod(t)}
	var err error
	p.netns, err = os.Open(p.pod.Path)
	kerneltest.Must(t, err)
	p.NS, err = Open(p.netns)
	kerneltest.Must(t, err)
	p.end = sync.OnceFunc(func() { p.Close(); p.netns.Close(); kerneltest.Must(t, p.pod.Close()) })
	t.Cleanup(p.end)
	return p
}

// moveVF: a VF keeps its MAC, MTU and alternative names when it moves into a pod under a new name and back.
func moveVF(t *testing.T, c card) {
	pod := newInside(t)
	vf := mustLink(t, c.host, c.VFs[0].Name)
	kerneltest.Must(t, c.host.AddAltName(vf, "kt-slot-1"), c.host.SetMTU(vf, 1400))
	want := mustLink(t, c.host, vf.Name)
	for _, name := range []string{"net1", vf.Name} {
		kerneltest.Must(t, c.host.SetUp(vf), c.host.MoveLink(vf, pod.netns, name))
		if _, ok, err := c.host.Link(vf.Name); ok || err != nil {
			t.Errorf("it is still here, %v", err)
		}
		got := mustLink(t, pod, name)
		if got.MAC.String() != want.MAC.String() || got.MTU != 1400 || got.Up || !slices.Equal(got.AltNames, []string{"kt-slot-1"}) ||
			got.Device != c.VFs[0].Device {
			t.Errorf("it was %+v, and is %+v", want, got)
		}
		kerneltest.Must(t, pod.MoveLink(got, c.netns, vf.Name))
		vf = mustLink(t, c.host, vf.Name)
		if vf.MAC.String() != want.MAC.String() || vf.Up || !slices.Equal(vf.AltNames, want.AltNames) {
			t.Errorf("it was %+v, and is %+v", want, vf)
		}
	}
	kerneltest.Must(t, c.host.DelAltName(vf, "kt-slot-1"), c.host.SetMTU(vf, 1500))
}

// moveVFTaken: a VF whose new or alternative name is taken in the pod stays on the host. A later move with an unused name succeeds.
func moveVFTaken(t *testing.T, c card) {
	pod := newInside(t)
	addBridge(t, pod, "net1")
	name := c.VFs[0].Name
	vf := mustLink(t, c.host, name)
	kerneltest.Must(t, c.host.AddAltName(vf, "net2"))
	for _, taken := range []string{"net1", "lo"} {
		if err := c.host.MoveLink(mustLink(t, c.host, name), pod.netns, taken); !errors.Is(err, unix.EEXIST) {
			t.Errorf("%s: %v", taken, err)
		}
		if got := mustLink(t, c.host, name); !slices.Equal(got.AltNames, []string{"net2"}) {
			t.Errorf("%s: %+v", taken, got)
		}
	}
	addBridge(t, pod, "net2")
	vf = mustLink(t, c.host, name)
	if err := c.host.MoveLink(vf, pod.netns, "net3"); !errors.Is(err, unix.EEXIST) {
		t.Errorf("alternative name: %v", err)
	}
	kerneltest.Must(t, c.host.DelAltName(vf, "net2"), c.host.MoveLink(vf, pod.netns, "net3"),
		pod.MoveLink(mustLink(t, pod, "net3"), c.netns, name))
	mustLink(t, c.host, name)
}

// moveVFBack: a VF stays in the pod if another link on the host has its name.
func moveVFBack(t *testing.T, c card) {
	pod := newInside(t)
	name := c.VFs[0].Name
	kerneltest.Must(t, c.host.MoveLink(mustLink(t, c.host, name), pod.netns, "net1"))
	kerneltest.Must(t, c.host.AddBridge(name, nil, 0, false, false))
	if err := pod.MoveLink(mustLink(t, pod, "net1"), c.netns, name); !errors.Is(err, unix.EEXIST) {
		t.Error(err)
	}
	if _, ok, err := c.host.Link("net1"); ok || err != nil {
		t.Errorf("it came as net1: %v", err)
	}
	kerneltest.Must(t, c.host.DelLink(name), pod.MoveLink(mustLink(t, pod, "net1"), c.netns, name))
}

// setInPod: a VF keeps the settings that a pod has changed, and the host can reset all of them for the next pod.
func setInPod(t *testing.T, c card) {
	pod := newInside(t)
	name := c.VFs[0].Name
	before := mustLink(t, c.host, name)
	kerneltest.Must(t, c.host.MoveLink(before, pod.netns, "net1"))
	vf := mustLink(t, pod, "net1")
	kerneltest.Must(t, pod.SetMAC(vf, mac("02:00:00:00:00:77")), pod.SetMTU(vf, 1300), pod.SetPromisc(vf, true), pod.SetAllMulti(vf, true),
		pod.SetUp(vf))
	vf = mustLink(t, pod, "net1")
	if vf.MAC.String() != "02:00:00:00:00:77" || vf.MTU != 1300 || !vf.Promis || !vf.AllMulti || !vf.Up {
		t.Errorf("%+v", vf)
	}
	// the VF keeps the changed settings when it returns to the host
	kerneltest.Must(t, pod.MoveLink(vf, c.netns, name))
	vf = mustLink(t, c.host, name)
	if vf.MAC.String() != "02:00:00:00:00:77" || vf.MTU != 1300 || !vf.Promis || !vf.AllMulti || vf.Up {
		t.Errorf("%+v", vf)
	}
	kerneltest.Must(t, c.host.SetMAC(vf, before.MAC), c.host.SetMTU(vf, before.MTU), c.host.SetPromisc(vf, false),
		c.host.SetAllMulti(vf, false))
	before.Index, vf = 0, mustLink(t, c.host, name)
	vf.Index = 0
	if diff := cmp.Diff(before, vf, cmp.FilterPath(func(p cmp.Path) bool {
		return p.Last().String() == ".Runs" || p.Last().String() == ".conf6"
	}, cmp.Ignore())); diff != "" {
		t.Error(diff)
	}
}

// end is the source or destination of a packet, a pod or the host.
type end struct {
	do func(func() error) error
	ip netip.Addr
}

func (c card) giveVF(t *testing.T, vf int, ip string) end {
	t.Helper()
	pod := newInside(t)
	kerneltest.Must(t, c.host.MoveLink(mustLink(t, c.host, c.VFs[vf].Name), pod.netns, "net1"))
	link := mustLink(t, pod, "net1")
	kerneltest.Must(t, pod.AddAddress(link, netip.MustParsePrefix(ip+"/24"), false), pod.SetUp(link))
	if c.PF == "" { // a veth is deleted with its pod
		t.Cleanup(func() { kerneltest.Must(t, pod.MoveLink(mustLink(t, pod, "net1"), c.netns, c.VFs[vf].Name)) })
	}
	return end{pod.pod.Do, netip.MustParseAddr(ip)}
}

// canReach sends packets until one arrives at the other end. It returns false if none does in time.
func (e end) canReach(t *testing.T, to end, within time.Duration) bool {
	t.Helper()
	var in *net.UDPConn
	var out net.Conn
	kerneltest.Must(t, to.do(func() (err error) {
		in, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(to.ip, 0)))
		return err
	}))
	defer in.Close()
	kerneltest.Must(t, e.do(func() (err error) {
		out, err = net.Dial("udp", in.LocalAddr().String())
		return err
	}))
	defer out.Close()
	for until := time.Now().Add(within); time.Now().Before(until); {
		_, _ = out.Write([]byte("x")) // the target may be unreachable, which the test checks
		kerneltest.Must(t, in.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
		if n, _ := in.Read(make([]byte, 1)); n == 1 {
			return true
		}
	}
	return false
}

// vfToVF: two pods with VFs of the same card reach each other.
func vfToVF(t *testing.T, c card) {
	a, b := c.giveVF(t, 0, "10.9.0.1"), c.giveVF(t, 1, "10.9.0.2")
	if !a.canReach(t, b, 20*time.Second) || !b.canReach(t, a, 20*time.Second) {
		t.Error("they do not reach one another")
	}
}

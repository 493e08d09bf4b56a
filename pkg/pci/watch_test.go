// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/kernel"
)

// fakeMachine provides scans and events in the fake time of testing/synctest.
type fakeMachine struct {
	mu     sync.Mutex
	now    *Snapshot
	err    error
	scans  []time.Duration // times since the start
	start  time.Time
	events chan kernel.Event
	seen   []*Snapshot
}

func (m *fakeMachine) scan() (*Snapshot, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.scans = append(m.scans, time.Since(m.start))
	return m.now, m.err
}

// setScan sets the result of all later scans: a device with n VFs, or an error.
func (m *fakeMachine) setScan(n int, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.now, m.err = nil, err; err == nil {
		m.now = &Snapshot{Devices: []Device{{NumVFs: n}}}
	}
}

// runWatch runs f during a watch and returns after the watch has ended.
func runWatch(t *testing.T, poll time.Duration, f func(m *fakeMachine)) *fakeMachine {
	t.Helper()
	m := &fakeMachine{}
	synctest.Test(t, func(t *testing.T) {
		m.start, m.events = time.Now(), make(chan kernel.Event)
		m.setScan(1, nil)
		ctx, stop := context.WithCancel(t.Context())
		first, err := m.scan()
		must(t, err)
		snapshots, ended := make(chan *Snapshot, 1), make(chan struct{})
		snapshots <- first
		go func() {
			watch(ctx, first, m.scan, m.events, poll, snapshots)
			close(snapshots)
		}()
		go func() {
			for s := range snapshots {
				m.seen = append(m.seen, s)
			}
			close(ended)
		}()
		synctest.Wait()
		f(m)
		stop()
		<-ended
	})
	return m
}

func (m *fakeMachine) hint() { m.events <- kernel.Event{Lost: true} }

func (m *fakeMachine) check(t *testing.T, scans ...time.Duration) {
	t.Helper()
	if !slices.Equal(m.scans, scans) {
		t.Errorf("scans at %v, want %v", m.scans, scans)
	}
}

// TestWatchBurst checks that a burst of events causes one scan, when it has been quiet for a while.
func TestWatchBurst(t *testing.T) {
	m := runWatch(t, time.Hour, func(m *fakeMachine) {
		time.Sleep(time.Second)
		for range 5 {
			m.hint()
			time.Sleep(50 * time.Millisecond)
		}
		time.Sleep(10 * time.Second)
	})
	m.check(t, 0, 1300*time.Millisecond)
	if len(m.seen) != 1 {
		t.Errorf("delivered %v", m.seen)
	}
}

// TestWatchStream checks that events without a pause cause a scan after noQuieter.
func TestWatchStream(t *testing.T) {
	m := runWatch(t, time.Hour, func(m *fakeMachine) {
		for range 70 {
			m.hint()
			time.Sleep(50 * time.Millisecond)
		}
	})
	if len(m.scans) < 4 || m.scans[1] != time.Second {
		t.Errorf("scans at %v", m.scans)
	}
}

// TestWatchPoll checks that polling finds a change without an event, and that its snapshot is sent once.
func TestWatchPoll(t *testing.T) {
	m := runWatch(t, time.Minute, func(m *fakeMachine) {
		time.Sleep(90 * time.Second)
		m.setScan(2, nil)
		time.Sleep(2 * time.Minute)
	})
	m.check(t, 0, time.Minute, 2*time.Minute, 3*time.Minute)
	if len(m.seen) != 2 {
		t.Errorf("delivered %v", m.seen)
	}
}

// TestWatchNoPoll checks that only events cause scans if the interval is 0.
func TestWatchNoPoll(t *testing.T) {
	runWatch(t, 0, func(*fakeMachine) { time.Sleep(24 * time.Hour) }).check(t, 0)
}

// TestWatchFails checks that nothing is sent after a failed scan, and that the next good one is compared with the last good one.
func TestWatchFails(t *testing.T) {
	m := runWatch(t, time.Minute, func(m *fakeMachine) {
		m.setScan(0, fs.ErrPermission)
		time.Sleep(90 * time.Second)
		m.setScan(1, nil)
		time.Sleep(time.Minute)
		m.setScan(2, nil)
		time.Sleep(time.Minute)
	})
	if len(m.scans) != 4 || len(m.seen) != 2 {
		t.Errorf("scans at %v, delivered %v", m.scans, m.seen)
	}
}

func TestWatchFailsAtOnce(t *testing.T) {
	if snapshots, err := Watch(t.Context(), t.TempDir(), time.Hour); !errors.Is(err, fs.ErrNotExist) || snapshots != nil {
		t.Error(err)
	}
}

// TestWatchKernel checks that an event of the real kernel causes a scan, but not one about the link of a pod.
func TestWatchKernel(t *testing.T) {
	sysfs := pcitest.Extract(t, "two-sockets")
	ctx, stop := context.WithCancel(t.Context())
	delivered, err := Watch(ctx, sysfs, time.Hour)
	must(t, err)
	before := <-delivered
	if len(before.Devices) != 12 || len(before.Nodes) == 0 {
		t.Errorf("at first %v", before)
	}
	pcitest.Remove(t, sysfs, "0000:3b:10.2")
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "ptb0"}}
	must(t, netlink.LinkAdd(bridge), netlink.LinkSetUp(bridge), netlink.LinkDel(bridge))
	select {
	case s := <-delivered:
		t.Errorf("after a bridge came: %v", differences(before, s))
	case <-time.After(400 * time.Millisecond):
	}
	lo, err := netlink.LinkByName("lo")
	must(t, err, netlink.LinkSetMTU(lo, 65535), netlink.LinkSetMTU(lo, 65536))
	select {
	case s := <-delivered:
		if _, ok := s.Device(address(t, "0000:3b:10.2")); ok || len(differences(before, s)) != 1 {
			t.Errorf("after an event: %v", differences(before, s))
		}
	case <-time.After(time.Minute):
		t.Error("an event of the kernel is not seen")
	}
	stop()
	for range delivered { // to its end
	}
}

// TestWatchTreeGoes checks that no empty snapshot is sent if the whole sysfs tree is missing.
func TestWatchTreeGoes(t *testing.T) {
	sysfs := pcitest.Extract(t, "in-pods")
	ctx, stop := context.WithCancel(t.Context())
	delivered, err := Watch(ctx, sysfs, 5*time.Millisecond)
	must(t, err)
	before := <-delivered
	at := filepath.Join(sysfs, devicesFolder)
	must(t, os.Rename(at, at+".away"))
	time.Sleep(30 * time.Millisecond)
	must(t, os.Rename(at+".away", at))
	pcitest.Set(t, sysfs, "0000:3b:00.0", "net/ens1f0/carrier", "0")
	after := <-delivered
	was, _ := before.Device(address(t, "0000:3b:00.0"))
	if is, _ := after.Device(was.Address); !was.Carrier || is.Carrier || !slices.Equal(differences(before, after), []string{"0000:3b:00.0"}) {
		t.Errorf("delivered %v", differences(before, after))
	}
	stop()
	for range delivered { // to its end
	}
}

func TestConcerns(t *testing.T) {
	for e, want := range map[kernel.Event]bool{
		{Lost: true}:                        true,
		{Link: "ens1f0"}:                    true,
		{Link: "ibs1", Kind: "ipoib"}:       true,
		{Link: "vethc0ffee", Kind: "veth"}:  false,
		{Link: "cni0", Kind: "bridge"}:      false,
		{Device: "/devices/virtual/net/lo"}: false,
		{Device: "/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/net/ens1f0"}: true,
		{Device: "/bus/pci/drivers/vfio-pci"}:                                true,
		{Device: "/module/nf_tables"}:                                        false,
	} {
		if isRelevant(e) != want {
			t.Errorf("%+v: %t", e, !want)
		}
	}
}

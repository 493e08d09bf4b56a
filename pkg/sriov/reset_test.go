// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func (l testLab) runReset(a string, act bool, function func() error) (string, error) {
	l.Helper()
	var out bytes.Buffer
	err := Reset(ResetOptions{Sysfs: l.sriov.sysfs, Address: address(l, a), Act: act, Function: function, Out: &out,
		Log: slog.New(slog.DiscardHandler)})
	return out.String(), err
}

// TestReset: an orphaned VF is restored, its driver unbound, its function reset and the driver bound again.
func TestReset(t *testing.T) {
	l := newLab(t)
	pcitest.Kernel{}.Start(t, l.sriov.sysfs)
	l.allocate(vf1)
	l.add("dead")
	if out, err := l.runReset(vf1, true, nil); plugin.Code(err) != plugin.CodeDevice || !strings.Contains(err.Error(),
		"pod shop/web-0 has it") ||
		out != "" {
		t.Errorf("in use: %v\n%s", err, out)
	}
	l.changeAsTenant("net1")
	l.endPod(vf1)
	spoilt := l.nodeLinks()
	out, err := l.runReset(vf1, false, func() error { return errors.New("called") })
	want := "VF 0000:11:02.1 has the settings of pod shop/web-0: restore its former settings\nunbind its driver iavf\nreset the function\nbind its driver iavf\n"
	if err != nil || out != want || l.nodeLinks() != spoilt {
		t.Errorf("a dry run: %v\n%s", err, out)
	}
	drivers := []string{}
	l.onBinding(vf1, func(net string) { must(t, os.MkdirAll(filepath.Join(net, "ens0f0v1"), 0o755)) })
	out, err = l.runReset(vf1, true, func() error { drivers = append(drivers, l.driverOf(vf1)); return nil })
	if err != nil || out != want || len(drivers) != 1 || drivers[0] != "." || l.driverOf(vf1) != "iavf" {
		t.Errorf("%v, driver meanwhile %q, then %s\n%s", err, drivers, l.driverOf(vf1), out)
	}
	l.isGolden()
	l.OK(l.Call("DEL", "dead", "CNI_NETNS", ""))
}

// TestResetTorn: Reset works on a VF with an unreadable journal.
func TestResetTorn(t *testing.T) {
	l := newLab(t)
	pcitest.Kernel{}.Start(t, l.sriov.sysfs)
	must(t, os.MkdirAll(JournalFolder, 0o700), os.WriteFile(l.journalOf(vf0), []byte("{"), 0o600))
	l.onBinding(vf0, func(net string) { must(t, os.MkdirAll(filepath.Join(net, "ens0f0v0"), 0o755)) })
	out, err := l.runReset(vf0, true, nil)
	if err != nil || !strings.Contains(out, "journal of VF 0000:11:02.0: unexpected end of JSON input: remove it\n") {
		t.Errorf("%v\n%s", err, out)
	}
	l.isGolden()
}

// TestResetFails: Reset binds the driver again if the reset of the function fails, but not if that exceeds its timeout, because a bind
// would hang.
func TestResetFails(t *testing.T) {
	for _, c := range []struct {
		err    error
		driver string
	}{{errors.New("no such way"), "iavf"}, {context.DeadlineExceeded, "."}} {
		t.Run(c.err.Error(), func(t *testing.T) {
			l := newLab(t)
			pcitest.Kernel{}.Start(t, l.sriov.sysfs)
			l.onBinding(vf0, func(net string) { must(t, os.MkdirAll(filepath.Join(net, "ens0f0v0"), 0o755)) })
			if out, err := l.runReset(vf0, true, func() error { return c.err }); !errors.Is(err, c.err) || l.driverOf(vf0) != c.driver {
				t.Errorf("%v, driver %s\n%s", err, l.driverOf(vf0), out)
			}
		})
	}
}

// TestResetRefused: Reset does not change a VF that the node or another namespace uses, or a function that is no VF.
func TestResetRefused(t *testing.T) {
	l := newLab(t)
	refused := func(a, says string) {
		t.Helper()
		if out, err := l.runReset(a, true, nil); plugin.Code(err) != plugin.CodeDevice || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q\n%s", err, says, out)
		}
	}
	refused("0000:11:00.0", "is not a VF of this node")
	link := l.link("ens0f0v1")
	must(t, l.host.AddAddress(link, netip.MustParsePrefix("192.0.2.7/24"), false))
	refused(vf1, "VF 0000:11:02.1 is in use on the node: ens0f0v1 is up with [192.0.2.7/24]")
	must(t, l.host.DelAddress(link, netip.MustParsePrefix("192.0.2.7/24")))
	var moved kernel.Link
	netns, err := os.Open(l.Pod.Path)
	must(t, err)
	defer netns.Close()
	must(t, l.host.MoveLink(l.link("ens0f0v2"), netns, "theirs"))
	refused(vf2, "VF 0000:11:02.2: its interface is in another namespace")
	home, err := l.host.File()
	must(t, err)
	defer home.Close()
	l.inPod(func(pod *kernel.NS) {
		moved, _, err = pod.Link("theirs")
		must(t, err, pod.MoveLink(moved, home, "ens0f0v2"))
	})
	// In sysfs, a macvlan uses the VF's interface.
	pcitest.Set(t, l.sriov.sysfs, vf0, "net/ens0f0v0/upper_macvlan7/type", "1")
	refused(vf0, "is in use on the node: ens0f0v0 is the lower interface of macvlan7")
	l.isGolden()
}

// TestReturn: if the runtime calls neither DEL nor GC, RestoreOrphans restores a VF that the kernel has moved back to the node.
func TestReturn(t *testing.T) {
	l := newLab(t)
	back := func() string {
		t.Helper()
		var log bytes.Buffer
		must(t, RestoreOrphans(l.sriov.sysfs, slog.New(slog.NewTextHandler(&log, nil))))
		return log.String()
	}
	if log := back(); log != "" {
		t.Errorf("no pods: %s", log)
	}
	l.allocate(vf1)
	a := l.add("a", "mac", "02:00:00:00:00:01")
	if log := back(); log != "" {
		t.Errorf("a pod has it: %s", log)
	}
	l.OK(a.check("mac", "02:00:00:00:00:01"))
	l.changeAsTenant("net1")
	l.endPod(vf1)
	if log := back(); !strings.Contains(log, "restored a VF whose pod has ended") || !strings.Contains(log, "pod=shop/web-0") {
		t.Errorf("log: %s", log)
	}
	l.isGolden()
	l.OK(l.Call("DEL", "a", "CNI_NETNS", ""))
}

// TestReturnUnseen: RestoreOrphans keeps the journal of a VF that sysfs does not show.
func TestReturnUnseen(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0)
	l.add("a")
	must(t, RestoreOrphans(pcitest.Generate(t, pcitest.Machine{Nodes: 1}), slog.New(slog.DiscardHandler)))
	if _, err := os.Stat(l.journalOf(vf0)); err != nil {
		t.Error(err)
	}
	l.del("a")
}

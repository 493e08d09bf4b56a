// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// binaryPath builds a program and returns its path.
func binaryPath(t *testing.T, folder, name string) string {
	t.Helper()
	path := filepath.Join(os.Getenv(folder), name)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%s: %v", folder, err)
	}
	return path
}

// killFault is the environment variable that kills the plugin at its nth fault point, a place at which tests can cause a fault
// ("moment" in the code).
const killFault = "PODLACE_RUN_AT=%d kill -KILL $PPID"

// runWithFault runs the plugin with a fault at the nth change or fault point, and returns the fault points that it reached.
func (l igb) runWithFault(fault string, at int, verb, id string, keys ...any) (o outcome, moments []string) {
	l.Helper()
	l.publish() // to the program that runs now
	trace := filepath.Join(l.TempDir(), "trace")
	variables, stdin := l.Request(verb, id, keys...)
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(binaryPath(l.T, "PODLACE_TOOLS", "fault/sriov"))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &stdout, &stderr
	cmd.Env = []string{fmt.Sprintf(fault, at), "PODLACE_FAULT_MOMENTS=" + trace}
	for k, v := range variables {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		l.Fatal(err)
	}
	text, err := os.ReadFile(trace)
	must(l, err)
	o = l.Outcome(verb, cmd.ProcessState.ExitCode(), stdout.Bytes(), stderr.String())
	return o, strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
}

// runKilled kills the plugin at the nth fault point of a CNI command. done is true if it has fewer.
func (l igb) runKilled(at int, verb, id string, keys ...any) (where string, done bool) {
	l.Helper()
	o, moments := l.runWithFault(killFault, at, verb, id, keys...)
	if o.Exit == 0 {
		return "", true
	}
	if o.Exit != -1 || len(moments) != at {
		l.Fatalf("exit %d: %s, %q", o.Exit, o.Stdout, moments)
	}
	return moments[at-1], false
}

// findResidue describes what should have been removed: VFs that are not restored, records, and leases beyond the expected number.
func (l igb) findResidue(leases int) (dirt string) {
	l.Helper()
	dirt = cmp.Diff(l.golden, l.nodeLinks())
	if all, err := Holdings(); err != nil || len(all) > 0 {
		dirt += fmt.Sprintf("journals %+v, %v\n", all, err)
	}
	if left, _ := filepath.Glob("/var/lib/cni/networks/net.vf/10.*"); len(left) != leases {
		dirt += fmt.Sprintf("leases %v\n", left)
	}
	if err := filepath.WalkDir("/run/podlace/net", func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() && strings.HasPrefix(e.Name(), "sriov-") {
			dirt += "record " + path + "\n"
		}
		return err
	}); err != nil && !errors.Is(err, fs.ErrNotExist) {
		dirt += err.Error()
	}
	return dirt
}

// everySetting returns every kind of VF setting that the driver supports.
func everySetting() []any {
	return []any{"vlan", 100, "vlanQoS", 3, "mac", "02:00:00:00:aa:01", "spoofchk", "on", "trust", "on", "max_tx_rate", 100, "mtu", 1400,
		"ipam", object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.61.0.0/24"}}}}}
}

// killSweep runs a CNI command once for each fault point, kills it there, and calls `after` to clean up. It counts the fault points at
// which a kill leaves residue.
func (l igb) killSweep(what string, before func(l igb, id string), verb string, after func(l igb, id string) (dirt string)) {
	points, dirty := 0, 0
	for at, done := 1, false; !done; at++ {
		l, where := l.otherPod(), ""
		id := fmt.Sprintf("k%d", at)
		before(l, id)
		where, done = l.runKilled(at, verb, id, everySetting()...)
		points = at - 1
		if dirt := after(l, id); dirt != "" {
			dirty++
			l.Errorf("%s, killed before %s: %s", what, where, dirt)
		}
		must(l, l.Pod.Close())
	}
	l.Logf("%s: killed at %d points, %d times the VFs were dirty afterwards", what, points, dirty)
}

// attachNext attaches the VF to a pod that configures nothing, and returns all differences from the initial state.
func (l igb) attachNext(index int, old string) (dirt string) {
	pod := l.otherPod()
	a := pod.add("next")
	pod.isDefault("net1", index)
	if old != "" { // its DEL comes late
		l.OK(l.Call("DEL", old, everySetting()...))
	}
	pod.OK(a.check())
	pod.OK(pod.Call("DEL", "next"))
	must(l, pod.Pod.Close())
	return l.findResidue(0)
}

// TestIGBKillAdd kills an ADD at every fault point. DEL then restores the VF, and the next pod gets it in its initial state.
func TestIGBKillAdd(t *testing.T) {
	l := newIGB(t)
	l.second()
	l.killSweep("ADD, then DEL", func(igb, string) {}, "ADD", func(l igb, id string) string {
		l.OK(l.Call("DEL", id, everySetting()...))
		return l.findResidue(0) + l.attachNext(1, "")
	})
}

// TestIGBKillAddOnly kills an ADD whose pod then ends. Another pod gets the VF before the runtime calls DEL for the first one.
func TestIGBKillAddOnly(t *testing.T) {
	l := newIGB(t)
	l.second()
	l.killSweep("ADD, and the pod dies", func(igb, string) {}, "ADD", func(l igb, id string) string {
		must(l, l.Pod.Close())
		return l.attachNext(1, id)
	})
}

// TestIGBKillDel kills a DEL at every fault point. The next one completes it.
func TestIGBKillDel(t *testing.T) {
	l := newIGB(t)
	l.second()
	l.killSweep("DEL, then DEL", func(l igb, id string) {
		l.add(id, everySetting()...)
		must(l, l.changeAll("net1"))
	}, "DEL", func(l igb, id string) string {
		l.OK(l.Call("DEL", id, everySetting()...))
		return l.findResidue(0) + l.attachNext(1, "")
	})
}

// TestIGBLives creates and removes many pods in a row. At each change or fault point, a change fails or the plugin is killed with a
// probability of 5 %.
func TestIGBLives(t *testing.T) {
	const lives = 100
	l := newIGB(t)
	random := rand.New(rand.NewPCG(1, 2))
	// misfortune returns the number of the change at which the fault occurs.
	misfortune := func() (n int) {
		for n = 1; random.Float64() > 0.05; n++ {
		}
		return n
	}
	dirty, failed, killed := 0, 0, 0
	call := func(l igb, verb, id string, keys ...any) bool {
		fault := []string{"PODLACE_FAIL_AT=%d", killFault}[random.IntN(2)]
		o, _ := l.runWithFault(fault, misfortune(), verb, id, keys...)
		switch {
		case o.Exit < 0:
			killed++
		case o.Exit > 0:
			failed++
		}
		return o.Exit == 0
	}
	for i := range lives {
		l, id, index := l.otherPod(), fmt.Sprintf("life%d", i), random.IntN(2)
		l.allocate(l.nic.VFs[index].Device)
		keys := everySetting()
		if random.IntN(2) == 0 {
			keys = nil
		}
		if call(l, "ADD", id, keys...) && random.IntN(2) == 0 {
			_ = l.changeAll("net1") // untrusted pods cannot change their MAC
		}
		if random.IntN(4) == 0 {
			must(t, l.Pod.Close())
		}
		for range 2 {
			if call(l, "DEL", id, keys...) {
				break
			}
		}
		l.OK(l.Call("DEL", id, keys...))
		must(t, RestoreOrphans(l.sriov.sysfs, slog.New(slog.DiscardHandler))) // what a DEL could not
		if dirt := l.findResidue(0); dirt != "" {
			dirty++
			t.Errorf("life %d: %s", i, dirt)
		}
		must(t, l.Pod.Close())
	}
	l.first()
	l.attachNext(0, "")
	l.second()
	l.attachNext(1, "")
	t.Logf("%d lives of pods, %d calls failed, %d were killed: %d times the VFs were dirty afterwards", lives, failed, killed, dirty)
}

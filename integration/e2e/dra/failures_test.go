// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podlace/podlace/integration/pcitest"
)

// TestKubeletRestart (failure 22): a kubelet deletes its node's slices when it starts. The daemon writes them again, and running pods keep
// their VFs.
func TestKubeletRestart(t *testing.T) {
	l := newLab(t, setup{})
	l.claim("vf", "nic")
	l.pod("web", "nic=vf")
	l.runs("web")
	ids := l.allocated("vf")
	for range 3 {
		before, mark := contentOf(l.slices()), l.mark()
		l.restartService("kubelet")
		var first, last time.Time
		within(t, "the slices are deleted and back", func() error {
			deleted := 0
			for _, r := range l.requests(mark, kubeletUser, "") {
				if first.IsZero() && r.Response.Code < 300 {
					first = r.Answered
				}
				if r.ObjectRef.Resource == "resourceslices" && strings.HasPrefix(r.Verb, "delete") {
					deleted++
				}
			}
			writes := l.writes(mark, "resourceslices")
			if deleted == 0 || len(writes) == 0 {
				return fmt.Errorf("the kubelet deleted %d times, and the daemon wrote %d times", deleted, len(writes))
			}
			last = writes[len(writes)-1].Answered
			return l.offers(l.ids...)
		})
		t.Logf("the slices are back %.1f s after the kubelet's first request, with %d writes", last.Sub(first).Seconds(),
			len(l.writes(mark, "resourceslices")))
		if diff := cmp.Diff(before, contentOf(l.slices())); diff != "" {
			t.Error(diff)
		}
	}
	l.attached("web", ids...)
	l.pod("late")
	l.runs("late")
}

// TestDaemonAway (failures 5, 6, 14): a sandbox that dies while the daemon is stopped is replaced with the same VF and without another
// Prepare. The claim of a pod that ends then is unprepared after the daemon's restart; until then, no other pod gets its VF.
func TestDaemonAway(t *testing.T) {
	l := newLab(t, setup{})
	l.template("vf", "nic")
	l.pod("web", "nic=+vf")
	l.pod("old", "nic=+vf")
	l.runs("web")
	l.runs("old")
	web, old := l.allocated(l.claimOf("web", "nic")), l.allocated(l.claimOf("old", "nic"))
	l.end(syscall.SIGKILL)
	former := l.killSandbox("web")
	l.awaitNewSandbox("web", former)
	l.attached("web", web...)

	if err := l.client.CoreV1().Pods(l.ns).Delete(t.Context(), "old", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	remains(t, "the pod does not go without the daemon", func() error {
		_, err := l.getPod("old")
		return err
	})
	if records, _ := filepath.Glob(claimRecords + "/*"); len(records) != 2 {
		t.Errorf("records of claims: %v", records)
	}
	l.run()
	l.gone("old")
	within(t, "the VF is home", func() error {
		if got := journals(); len(got) != 1 || got[0] != web[0] {
			return fmt.Errorf("journals of %v, of pod old it was %v", got, old)
		}
		return nil
	})
	l.attached("web", web...)
}

// away makes the API server unreachable from the node until the returned function is called.
func (l *lab) away() (back func()) {
	l.Helper()
	config := l.config.Host
	at := netip.MustParseAddrPort(strings.TrimPrefix(config, "https://")).Addr().String()
	rule := func(verb, chain, direction string) {
		l.Helper()
		out, err := exec.Command("iptables", "-w", verb, chain, direction, at, "-p", "tcp", "-j", "REJECT",
			"--reject-with", "tcp-reset").CombinedOutput()
		if err != nil {
			l.Fatalf("iptables %s: %v: %s", verb, err, out)
		}
	}
	rule("-I", "OUTPUT", "-d")
	done := false
	back = func() {
		if !done {
			rule("-D", "OUTPUT", "-d")
		}
		done = true
	}
	l.Cleanup(func() {
		back()
		l.apiReady()
	})
	return back
}

// TestAPIAway (failures 1, 2, 3): without the API server, ADD and DEL of a pod with a prepared claim work, a restarted daemon serves the
// device plugin API, and the kubelet creates no sandbox for pods with claims. The daemon publishes its slices once the server is back.
func TestAPIAway(t *testing.T) {
	needGate(t, "DRADeviceTaints")
	l := newLab(t, setup{})
	l.claim("vf", "nic")
	l.configure(half)
	within(t, "the VFs of a PF are in slices", func() error { return l.offers(l.ids[:4]...) })
	added := l.blockADD()
	l.pod("web", "nic=vf")
	within(t, "the pod is in its ADD", func() error { return exists("/run/node/adding") })
	if l.noRecords() == nil {
		t.Error("ADD came before the claim was prepared")
	}
	mark, back := l.mark(), l.away()
	l.end(syscall.SIGKILL)
	l.run()
	within(t, "the kubelet may give away the VFs of the device plugin", func() error { return allocatableNow(4) })
	added()
	within(t, "the pod has its VF", func() error {
		if _, ok := l.sandboxOf("web"); !ok {
			return errors.New("it has no sandbox")
		}
		if _, ok := l.inside("web")["net1"]; !ok {
			return errors.New("it has no net1")
		}
		return nil
	})
	former := l.killSandbox("web")
	within(t, "the VF is home", l.allHome)
	if up := l.metric("podlace_sriov_dra_up"); up != "0" {
		t.Errorf("podlace_sriov_dra_up is %q: want 0", up)
	}
	pcitest.Set(t, l.sysfs, pf0, "net/"+pf0Name+"/carrier", "0") // this change has to wait for the API server
	time.Sleep(2 * time.Second)
	back()
	took := within(t, "the daemon has published the change", func() error { return l.tainted(pf0, true) })
	t.Logf("%.1f s after the API server was back the change is there, after %d writes", took.Seconds(), len(l.writes(mark, "resourceslices")))
	within(t, "the daemon is up", func() error {
		if up := l.metric("podlace_sriov_dra_up"); up != "1" {
			return fmt.Errorf("podlace_sriov_dra_up is %q", up)
		}
		return nil
	})
	l.awaitNewSandbox("web", former)
	l.attached("web", l.allocated("vf")...)
}

// blockADD blocks each ADD of the sriov plugin until the returned function is called.
func (l *lab) blockADD() (release func()) {
	l.Helper()
	_ = os.Remove("/run/node/adding")
	if err := os.WriteFile("/run/node/hold", nil, 0o600); err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { _ = os.Remove("/run/node/adding") })
	restore := l.script(`if [ "$CNI_COMMAND" = ADD ]; then touch /run/node/adding; while [ -e /run/node/hold ]; do sleep 0.1; done; fi
exec $REAL
`)
	return func() {
		_ = os.Remove("/run/node/hold")
		restore()
	}
}

func exists(path string) error {
	_, err := os.Stat(path)
	return err
}

// TestRecordsLost (failure 7): a pod's next sandbox gets the VF although the claim's record was deleted, and the daemon writes it again.
func TestRecordsLost(t *testing.T) {
	l := newLab(t, setup{})
	l.claim("vf", "nic")
	l.pod("web", "nic=vf")
	l.runs("web")
	ids := l.allocated("vf")
	if err := os.RemoveAll(claimRecords); err != nil {
		t.Fatal(err)
	}
	former := l.killSandbox("web")
	l.awaitNewSandbox("web", former)
	l.attached("web", ids...)
	if records, _ := filepath.Glob(claimRecords + "/*"); len(records) != 1 {
		t.Errorf("records of claims: %v", records)
	}
}

// TestStateDamaged (failure 8): with one wrong letter in the kubelet's state file, a pod with a claim never starts without its VF. Pods in
// Kubernetes namespaces without claims still start. The next Prepare writes the file again.
func TestStateDamaged(t *testing.T) {
	l := newLab(t, setup{})
	l.claim("vf", "nic")
	l.pod("web", "nic=vf")
	l.runs("web")
	ids := l.allocated("vf")
	added := l.blockADD()
	former := l.killSandbox("web")
	within(t, "the pod is in its ADD", func() error { return exists("/run/node/adding") })
	l.damageState()
	added()
	t.Logf("event of the pod: %.400s", l.event("web", "checksum"))
	l.awaitNewSandbox("web", former)
	l.attached("web", ids...)

	added = l.blockADD()
	if err := l.tryCreate("{kind: Pod, metadata: {name: plain, namespace: default}, spec: {}}"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.client.CoreV1().Pods("default").Delete(l.background(), "plain", metav1.DeleteOptions{}) })
	within(t, "the pod is in its ADD", func() error { return exists("/run/node/adding") })
	l.damageState()
	added()
	within(t, "a pod of a namespace without claims runs", func() error {
		p, err := l.client.CoreV1().Pods("default").Get(t.Context(), "plain", metav1.GetOptions{})
		if err == nil {
			err = isRunning(p)
		}
		return err
	})
}

// damageState changes one letter of the kubelet's state file.
func (l *lab) damageState() {
	l.Helper()
	file := filepath.Join(kubeletRoot, "dra_manager_state")
	data, err := os.ReadFile(file)
	if err == nil {
		err = os.WriteFile(file, []byte(strings.Replace(string(data), "ClaimUID", "ClaimUlD", 1)), 0o600)
	}
	if err != nil {
		l.Fatal(err)
	}
}

// TestContainerdRestart: after a kill of containerd, running pods keep their VFs, and new pods get VFs.
func TestContainerdRestart(t *testing.T) {
	l := newLab(t, setup{})
	l.template("vf", "nic")
	l.pod("web", "nic=+vf")
	l.runs("web")
	for i := range 2 {
		if err := syscall.Kill(servicePID("containerd"), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		name := fmt.Sprint("new-", i)
		l.pod(name, "nic=+vf")
		l.runs(name)
		l.attached(name, l.allocated(l.claimOf(name, "nic"))...)
		l.attached("web", l.allocated(l.claimOf("web", "nic"))...)
	}
}

// TestHostNetwork (failure 34): the VF of a pod with a claim and the host's network stays on the node, and is free after the pod.
func TestHostNetwork(t *testing.T) {
	l := newLab(t, setup{})
	l.claim("vf", "nic")
	l.create("{kind: Pod, metadata: {name: web}, spec: {hostNetwork: true, " + claimList([]string{"nic=vf"}) + "}}")
	p := l.runs("web")
	if err := l.allHome(); err != nil || p.Status.Phase != core.PodRunning {
		t.Error(err)
	}
	if err := l.noRecords(); err == nil {
		t.Error("the claim is not prepared")
	}
	l.delete("web")
	within(t, "the claim is unprepared", l.noRecords)
}

// TestDiskFull (failure 35): the daemon cannot write a claim's record to a full disk. Until there is space, the claim is not prepared, and
// no VF moves into the pod.
func TestDiskFull(t *testing.T) {
	l := newLab(t, setup{})
	if err := os.MkdirAll(claimRecords, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("full", claimRecords, "tmpfs", 0, "mode=700,nr_inodes=1"); err != nil {
		t.Fatal(err)
	}
	isFull := true
	empty := func() {
		if isFull {
			_ = syscall.Unmount(claimRecords, syscall.MNT_DETACH)
		}
		isFull = false
	}
	t.Cleanup(empty)
	l.claim("vf", "nic")
	l.pod("web", "nic=vf")
	t.Logf("event of the pod: %.300s", l.event("web", "no space left on device"))
	l.pending("web")
	if err := l.allHome(); err != nil {
		t.Error(err)
	}
	empty()
	l.runs("web")
	l.attached("web", l.allocated("vf")...)
}

// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/harness/card"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/store"
)

const (
	vfsOfCard = 4
	faulty    = 20 // one of 20 calls fails at a change, and one of 20 calls is killed
)

// vfNode is a node on which pods with VFs come and go. The runtime sends one DEL after a failed ADD, and repeats a failed DEL only for a
// pod whose ADD succeeded.
type vfNode struct {
	*testing.T
	random  *rand.Rand
	card    *card.Card
	host    *kernel.Node
	golden  []string
	running []*podLife // index: VF
	late    []*podLife // pods with a late DEL; at this DEL, another pod may have the VF
	usual   map[string]callOutcome

	number, failed, killed int
	dirty, after, refused  int // the field after counts the pods that got a VF before its restoration
}

// podLife is one pod from its ADD to its end: its VF, its interface and how it ends.
type podLife struct {
	pod  *sandbox.Pod
	step chainStep
	vf   int
	name string // interface name
	prev []byte
	end  string
}

// TestLives (F-31, F-34, F-36, S-30) runs thirty pods, or a thousand with FAULTS=all. On average, one call in twenty fails at a random
// change and one is killed there. A pod's DEL is usual, repeated, late, without a namespace, after its end, or missing. Each pod starts
// with a VF that has the administrator's settings, and at the end all VFs are on the node and have them again.
func TestLives(t *testing.T) {
	l := newLives(t)
	total := harness.Some(30, 1000)
	for l.number < total && l.dirty < 10 && !t.Failed() {
		l.beginLife()
		if live := l.live(); len(live) == vfsOfCard || len(live) > 0 && l.random.IntN(3) > 0 {
			l.finishLife(live[l.random.IntN(len(live))])
		}
		l.late = slices.DeleteFunc(l.late, func(of *podLife) bool {
			return l.random.IntN(3) == 0 && l.delLate(of)
		})
	}
	for _, of := range l.live() {
		of.end = "DEL"
		l.finishLife(of)
	}
	l.collectAll()
	fmt.Fprintf(t.Output(), "%d lives, %d calls failed by injection, %d killed, %d pods got a VF before its restoration; %d dirty VFs\n",
		l.number, l.failed, l.killed, l.after, l.dirty)
	fmt.Fprintf(t.Output(), "figures: points=%d leaks=%d duplicates=0 next=%d failed=%d\n", l.failed+l.killed, l.dirty, l.after, l.refused)
	if least := max(1, total/40); l.failed+l.killed < least || l.after < least {
		t.Error("the test injected too few faults")
	}
}

func newLives(t *testing.T) *vfNode {
	t.Helper()
	host, err := kernel.Host()
	if err := errors.Join(err, os.RemoveAll(store.Root), os.RemoveAll("/var/lib/cni")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(host.Close)
	l := &vfNode{T: t, random: kerneltest.Random(t), card: card.New(t, 0), host: host, running: make([]*podLife, vfsOfCard),
		usual: map[string]callOutcome{}}
	for i := range vfsOfCard {
		l.golden = append(l.golden, l.describeVF(i))
	}
	return l
}

func (l *vfNode) live() []*podLife {
	return slices.DeleteFunc(slices.Clone(l.running), func(of *podLife) bool { return of == nil })
}

// describeVF describes the VF on the node, or returns "" while no link there has its name.
func (l *vfNode) describeVF(vf int) string {
	l.Helper()
	link, ok, err := l.host.Link(card.Name(vf))
	if err != nil {
		l.Fatal(err)
	}
	if !ok || link.Name != card.Name(vf) { // a pod gave this name to another link
		return ""
	}
	return fmt.Sprintf("%s %q up %t %s", link.Name, link.AltNames, link.Up, describeSettings(link))
}

// describeSettings describes the settings of the VF that a pod can see.
func describeSettings(link kernel.Link) string {
	return fmt.Sprintf("mac %s mtu %d promisc %t allmulti %t alias %q", link.MAC, link.MTU, link.Promis, link.AllMulti, link.Alias)
}

// callPlugin runs a verb, perhaps with a fault, and reports whether it succeeded. A failure that no injected fault explains fails the test.
func (l *vfNode) callPlugin(of *podLife, verb string, mayFault bool) (stdout []byte, ok bool) {
	l.Helper()
	kind := fmt.Sprint(verb, of.step.conf["ipam"] != nil, of.name)
	fault := "NO=1"
	if usual := l.usual[kind]; mayFault && len(usual.changes) > 0 {
		switch l.random.IntN(faulty) {
		case 0:
			fault = fmt.Sprint("PODLACE_FAIL_AT=", 1+l.random.IntN(len(usual.changes)))
		case 1:
			fault = fmt.Sprintf("PODLACE_RUN_AT=%d kill -KILL $PPID", 1+l.random.IntN(len(usual.moments)))
		}
	}
	if verb == "ADD" {
		l.card.Allocate(of.vf)
	}
	c := pluginCall{chainStep: of.step, verb: verb, pod: of.pod, prev: of.prev}
	o := c.runWith(l, fault)
	card.Tell(l)
	switch {
	case o.exit < 0:
		l.killed++
	case o.exit != 0 && strings.Contains(string(o.stdout), "injected fault"):
		l.failed++
	case o.exit != 0:
		l.refused++
		l.Errorf("life %d, VF %d, %s %s: %s", l.number, of.vf, fault, verb, o.stdout)
	case fault == "NO=1":
		l.usual[kind] = o
	}
	return o.stdout, o.exit == 0
}

// beginLife runs ADD of a pod with a free VF.
func (l *vfNode) beginLife() {
	l.Helper()
	free := slices.DeleteFunc([]int{0, 1, 2, 3}, func(i int) bool { return l.running[i] != nil })
	if len(free) == 0 {
		return
	}
	l.number++
	of := &podLife{pod: kerneltest.NewPod(l.T), vf: free[l.random.IntN(len(free))], name: "eth0"}
	conf := object{"cniVersion": "1.1.0", "name": "lives", "type": "sriov", "resources": []any{card.Resource}}
	if l.random.IntN(2) == 0 {
		of.name, of.prev = "net1", fmt.Appendf(nil, `{"cniVersion":"1.1.0","interfaces":[{"name":"lo","sandbox":%q}]}`, of.pod.Path)
	}
	if l.random.IntN(2) == 0 {
		conf = conf.With("mtu", 1300, "mac", fmt.Sprintf("02:00:00:00:00:%02x", l.random.IntN(256)))
	}
	if l.random.IntN(2) == 0 {
		conf = conf.With("ipam", object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.84.0.0/24"}}}})
	}
	of.step = chainStep{"sriov", conf}
	of.end = []string{"DEL", "DEL twice", "gone first", "no netns", "late", "never"}[l.random.IntN(6)]
	if l.describeVF(of.vf) != l.golden[of.vf] {
		l.after++
	}
	if _, ok := l.callPlugin(of, "ADD", true); !ok {
		if l.random.IntN(10) > 0 {
			l.callPlugin(of, "DEL", true)
		}
		l.closeNetns(of)
		return
	}
	l.running[of.vf] = of
	l.checkAndChange(of)
}

// checkAndChange checks that a pod's VF has the expected settings, and then changes those that a tenant can change.
func (l *vfNode) checkAndChange(of *podLife) {
	l.Helper()
	l.withInterface(of, func(pod *kernel.NS, link kernel.Link) error {
		want := strings.SplitAfter(l.golden[of.vf], " up false ")
		got := describeSettings(link)
		if of.step.conf["mtu"] != nil {
			want[1] = fmt.Sprintf("mac %s mtu 1300 promisc false allmulti false alias \"\"", of.step.conf["mac"])
		}
		if got != want[1] || len(link.AltNames) > 0 || !link.Up {
			l.dirty++
			l.Errorf("life %d found VF %d with %q %s, want %s", l.number, of.vf, link.AltNames, got, want[1])
		}
		if l.random.IntN(2) == 0 {
			return nil
		}
		return errors.Join(pod.SetPromisc(link, true), pod.SetAllMulti(link, true), pod.SetMTU(link, 1280), pod.SetAlias(link, "tenant's"),
			pod.AddAltName(link, card.Name((of.vf+1)%vfsOfCard))) // except the MAC, which identifies the test's veths
	})
}

// withInterface calls f with the pod's interface, if it has one.
func (l *vfNode) withInterface(of *podLife, f func(*kernel.NS, kernel.Link) error) {
	l.Helper()
	netns, err := os.Open(of.pod.Path)
	if err != nil {
		l.Fatal(err)
	}
	defer netns.Close()
	pod, err := kernel.Open(netns)
	if err != nil {
		l.Fatal(err)
	}
	defer pod.Close()
	link, ok, err := pod.Link(of.name)
	if err == nil && ok {
		err = f(pod, link)
	}
	if err != nil {
		l.Fatal(err)
	}
}

// closeNetns ends a pod's namespace. A VF in it returns to the node.
func (l *vfNode) closeNetns(of *podLife) {
	l.Helper()
	in := false
	l.withInterface(of, func(*kernel.NS, kernel.Link) error { in = true; return nil })
	if in {
		card.Leave(l, of.pod.Path, of.name)
	}
	if err := of.pod.Close(); err != nil {
		l.Fatal(err)
	}
}

func (l *vfNode) finishLife(of *podLife) {
	l.Helper()
	l.running[of.vf] = nil
	switch of.end {
	case "never", "late", "gone first":
		l.closeNetns(of)
	}
	switch of.end {
	case "never":
		return
	case "late":
		l.late = append(l.late, of)
		return
	case "no netns":
		of.pod.Path = "" // the following calls get no namespace; close finds the path again
		defer func() { of.pod.Path = filepath.Join("/run/netns", of.pod.Name); l.closeNetns(of) }()
	case "DEL", "DEL twice":
		defer l.closeNetns(of)
	}
	l.delUntilDone(of)
	if of.end == "DEL twice" {
		l.delUntilDone(of)
	}
	if got := l.describeVF(of.vf); got != l.golden[of.vf] {
		l.dirty++
		l.Errorf("life %d, %s, left VF %d as %q, want %s", l.number, of.end, of.vf, got, l.golden[of.vf])
	}
}

// delUntilDone retries DEL until it succeeds, as the kubelet does.
func (l *vfNode) delUntilDone(of *podLife) {
	l.Helper()
	for again := range 3 {
		if _, ok := l.callPlugin(of, "DEL", again < 2); ok {
			return
		}
	}
}

// delLate sends a DEL so late that the VF may belong to another pod, which may still run or have ended.
func (l *vfNode) delLate(of *podLife) bool {
	l.Helper()
	l.delUntilDone(of)
	if now := l.running[of.vf]; now != nil {
		l.withInterface(now, func(_ *kernel.NS, link kernel.Link) error {
			if !link.Up {
				return fmt.Errorf("the DEL of %s took %s from %s", of.pod.Name, link.Name, now.pod.Name)
			}
			return nil
		})
		if l.describeVF(of.vf) != "" {
			l.Errorf("the DEL of %s took VF %d from %s", of.pod.Name, of.vf, now.pod.Name)
		}
	}
	return true
}

// collectAll runs GC without valid attachments. Then no state of any pod remains.
func (l *vfNode) collectAll() {
	l.Helper()
	if err := kerneltest.Age(kerneltest.StateDirs()...); err != nil {
		l.Fatal(err)
	}
	gc := &podLife{pod: kerneltest.NewPod(l.T),
		step: chainStep{"sriov", object{"cniVersion": "1.1.0", "name": "lives", "type": "sriov", "resources": []any{card.Resource},
			"ipam": object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.84.0.0/24"}}}}}}}
	l.callPlugin(gc, "GC", false)
	for i, want := range l.golden {
		if got := l.describeVF(i); got != want {
			l.dirty++
			l.Errorf("at the end VF %d is %q, want %s", i, got, want)
		}
	}
	for _, pattern := range []string{store.Root + "/.vfs/0000*", store.Root + "/lives/sriov-*", "/var/lib/cni/networks/lives*/10.*"} {
		if left, err := filepath.Glob(pattern); err != nil || len(left) > 0 {
			l.Errorf("left: %q, %v", left, err)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	attachments "github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// sweepBudget is the maximum duration of TestSweepAdd or TestSweepDel without FAULTS=all.
const sweepBudget = 3 * time.Second

// victimID is the container ID of the pod whose ADD or DEL is killed.
const victimID = "sweep-victim"

// killSweep kills a running chain at every change and between the changes, or at a sample of these points. After each kill, killSweep calls
// the plugins as a runtime would.
type killSweep struct {
	*harness.Network // the chain, without kills
	conflist         []byte
	cacheDir         string
	dir              string
	stays            *sandbox.Pod // permanent pod, which must stay unchanged
	taken            []string     // addresses of the permanent pod
	bridge           int          // number of points of ADD of the bridge, the first plugin
	kills            int
	failures         int
	collected        string // log of the last GC

	harness.Tally
}

// killCase is one test case: the verb, the point of the kill, the killed process, and the runtime's reaction to the kill.
type killCase struct {
	verb   string
	at     int
	policy string
	then   string
}

// Each constant "then…" is the first call of a runtime after a kill.
const (
	thenDel     = "DEL"
	thenEmptied = "DEL with empty netns"
	thenCollect = "GC"
	thenAdd     = "ADD again"
)

// TestSweepAdd and TestSweepDel run only a sample of their test cases, so that they are short enough for every test run. With FAULTS=all,
// these two tests run every test case.
func TestSweepAdd(t *testing.T) { sweepBoth(t, "ADD", "F-01 SIGKILL at each change of ADD") }

func TestSweepDel(t *testing.T) { sweepBoth(t, "DEL", "F-02 SIGKILL at each change of DEL") }

func sweepBoth(t *testing.T, verb, title string) {
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(title+", "+backend, func(t *testing.T) {
			harness.NeedBackend(t, backend)
			newSweep(t, backend).sweep(t, verb)
		})
	}
}

func newSweep(t *testing.T, backend string) *killSweep {
	t.Helper()
	s := &killSweep{conflist: harness.ChainOf(t, "1.1.0", backend), cacheDir: t.TempDir(), dir: t.TempDir()}
	var err error
	if s.Network, err = harness.OpenNetwork(s.conflist, s.cacheDir, nil); err != nil {
		t.Fatal(err)
	}
	s.stays = harness.NewPod(t, "sweep-stays")
	limits := map[string]any{"bandwidth": harness.Capabilities()["bandwidth"]}
	s.taken = harness.Addresses(t, s.Must(t, "ADD", harness.Attachment(s.stays, "stays", limits)))
	t.Cleanup(func() { s.Must(t, "DEL", harness.Attachment(s.stays, "stays", nil)) })
	s.settleNode(t)
	return s
}

// settleNode makes the state of the pod that stays attached in all test cases look old, because GC ignores state that is less than one
// second old. It also creates the state that the first pod with a port shares with later pods.
func (s *killSweep) settleNode(t *testing.T) {
	t.Helper()
	if err := kerneltest.Age(harness.StateDirs()...); err != nil {
		t.Fatal(err)
	}
	pod := harness.NewPod(t, victimID)
	s.Must(t, "ADD", harness.Attachment(pod, victimID, harness.Capabilities()))
	s.Must(t, "DEL", harness.Attachment(pod, victimID, harness.Capabilities()))
	if err := pod.Close(); err != nil {
		t.Fatal(err)
	}
}

// runKilled runs the verb of the chain, and kills the process that the test case selects.
func (s *killSweep) runKilled(k killCase) (*faultExec, error) {
	e := &faultExec{at: k.at, run: killCommand(k.policy, syscall.SIGKILL), dir: s.dir}
	n, err := harness.OpenNetwork(s.conflist, s.cacheDir, e)
	if err != nil {
		return nil, err
	}
	pod := &sandbox.Pod{Path: "/run/netns/" + victimID}
	_, err = n.Do(k.verb, harness.Attachment(pod, victimID, harness.Capabilities()), nil)
	if e.reached {
		err = nil
	}
	return e, err
}

func (s *killSweep) sweep(t *testing.T, verb string) {
	points, cost := s.measureVerb(t, verb)
	cases := casesOf(verb, points)
	stride := 1
	if !harness.Exhaustive() {
		// In the list of test cases, the runtime's reactions repeat every 3 or 4 cases. The test runs only every nth case, where n is the
		// variable `stride`. If the stride is not divisible by 2 or 3, the sample contains each reaction.
		for stride = int(cost*time.Duration(len(cases))/sweepBudget) + 1; stride%3 == 0 || stride%2 == 0; {
			stride++
		}
	}
	visited := 0
	for i := 0; i < len(cases); i += stride {
		s.runCase(t, cases[i])
		visited++
	}
	t.Logf("%s: %d points, %d of %d cases (every %d.), %d kills, %d failed", verb, points, visited, len(cases), stride, s.kills, s.failures)
	s.Points = visited
	s.Report(t)
	if s.kills*10 < visited*8 {
		t.Errorf("%s: only %d of %d cases came to a kill", verb, s.kills, visited)
	}
}

// measureVerb runs one ADD and one DEL without a kill. It returns the number of points at which a test can kill the verb, and the estimated
// duration of one test case. One test case takes about twice as long as this ADD and DEL together.
func (s *killSweep) measureVerb(t *testing.T, verb string) (int, time.Duration) {
	t.Helper()
	points := 0
	start := time.Now()
	pod := harness.NewPod(t, victimID)
	for _, v := range []string{"ADD", "DEL"} {
		e, err := s.runKilled(killCase{verb: v, policy: "self"})
		if err != nil {
			t.Fatalf("%s without a kill: %v", v, err)
		}
		if v == verb {
			points = e.points
		}
		if v == "ADD" {
			s.bridge = e.ended[0]
		}
	}
	if err := pod.Close(); err != nil {
		t.Fatal(err)
	}
	if points < 12 { // DEL of podlace-pod has 16
		t.Fatalf("%s has only %d points", verb, points)
	}
	return points, 2 * time.Since(start)
}

// casesOf returns one test case for each pair of a point for the kill and a reaction of the runtime. Consecutive test cases kill different
// processes.
func casesOf(verb string, points int) []killCase {
	policies := []string{"self", "root", "all"}
	follow := []string{thenDel, thenEmptied, thenCollect}
	if verb == "ADD" {
		follow = append(follow, thenAdd)
	}
	var cases []killCase
	for at := 1; at <= points; at++ {
		for _, then := range follow {
			cases = append(cases, killCase{verb: verb, at: at, policy: policies[(at+len(cases))%3], then: then})
		}
	}
	return cases
}

// runCase kills the verb, calls the plugins as the runtime does after the kill, and looks for leaked state. A later ADD and DEL of the same
// container must work.
func (s *killSweep) runCase(t *testing.T, k killCase) {
	t.Helper()
	where, err := s.tryOne(k)
	if err == nil {
		s.Next++
		if err = s.attachAgain(); err != nil {
			s.NextFailed++
		}
	}
	if err != nil {
		s.failures++
		t.Errorf("%s killed at %d (%s, policy %s), then %s: %v", k.verb, k.at, where, k.policy, k.then, err)
	}
}

func (s *killSweep) tryOne(k killCase) (where string, err error) {
	pod, err := sandbox.NewPod(victimID)
	if err != nil {
		return "", err
	}
	defer pod.Close()
	before, err := harness.NewOracle(s.stays, pod)
	if err != nil {
		return "", err
	}
	rt := harness.Attachment(pod, victimID, harness.Capabilities())
	if k.verb == "DEL" {
		if _, err := s.Do("ADD", rt, nil); err != nil {
			return "", fmt.Errorf("ADD before: %w", err)
		}
	}
	e, err := s.runKilled(k)
	if err != nil {
		return "", fmt.Errorf("no kill, but: %w", err)
	}
	if e.reached {
		s.kills++
	}
	if err := s.followUp(k, pod, rt); err != nil {
		_, _ = s.Do("DEL", rt, nil) // separate the next case from this failure
		return e.where, err
	}
	leaks, err := before.Leaks()
	if err == nil && len(leaks) > 0 {
		s.Leaks++
		err = fmt.Errorf("%d leaks: %q", len(leaks), leaks)
	}
	return e.where, err
}

// followUp calls the plugins as a runtime does after the kill.
func (s *killSweep) followUp(k killCase, pod *sandbox.Pod, rt *libcni.RuntimeConf) error {
	switch k.then {
	case thenAdd:
		if err := s.addAgain(rt); err != nil {
			return err
		}
	case thenEmptied:
		if err := pod.Close(); err != nil {
			return err
		}
		rt.NetNS = ""
	case thenCollect:
		if k.at%2 == 0 {
			if err := pod.Close(); err != nil {
				return err
			}
		}
		if err := kerneltest.Age(harness.StateDirs()...); err != nil {
			return err
		}
		return s.collectOthers()
	}
	_, err := s.Do("DEL", rt, nil)
	return err
}

// collectOthers runs GC with an empty cache, because libcni would first send DEL for every cached attachment.
func (s *killSweep) collectOthers(alive ...string) error {
	n, err := harness.OpenNetwork(s.conflist, s.dir+"/none", nil)
	if err == nil {
		valid := []types.GCAttachment{{ContainerID: "stays", IfName: "eth0"}}
		for _, id := range alive {
			valid = append(valid, types.GCAttachment{ContainerID: id, IfName: "eth0"})
		}
		_, err = n.Do("GC", nil, valid)
		s.collected = n.Stderr.String()
	}
	return err
}

// addAgain retries ADD without a DEL. This second ADD may fail if the record of the bridge plugin shows that the bridge plugin had finished
// before the kill. In all other cases, the second ADD must succeed.
func (s *killSweep) addAgain(rt *libcni.RuntimeConf) error {
	records, err := attachments.RecordsOf(attachments.Key{Network: "chain", ContainerID: rt.ContainerID, IfName: rt.IfName}, "bridge")
	if err != nil {
		return err
	}
	var state struct{ Unfinished bool }
	rec, finished := records["bridge"]
	if finished {
		if err := json.Unmarshal(rec.State, &state); err != nil {
			return err
		}
		finished = !state.Unfinished
	}
	_, err = s.Do("ADD", rt, nil)
	if err == nil {
		if finished {
			return errors.New("a second ADD of a finished attachment succeeded")
		}
		_, err = s.Do("CHECK", rt, nil)
		return err
	}
	var refused *types.Error
	if finished && errors.As(err, &refused) && refused.Code == harness.CodeTaken && strings.Contains(refused.Details, "call DEL first") {
		return nil
	}
	return fmt.Errorf("ADD again: %w", err)
}

// attachAgain attaches and detaches the same container once more.
func (s *killSweep) attachAgain() error {
	pod, err := sandbox.NewPod(victimID)
	if err != nil {
		return err
	}
	defer pod.Close()
	rt := harness.Attachment(pod, victimID, harness.Capabilities())
	result, err := s.Do("ADD", rt, nil)
	if err != nil {
		return fmt.Errorf("next ADD: %w", err)
	}
	for _, address := range s.taken {
		if strings.Contains(string(harness.Encode(result)), `"`+address+`/`) {
			s.Duplicates++
			err = fmt.Errorf("%s was given twice", address)
		}
	}
	for _, verb := range []string{"CHECK", "DEL"} {
		if _, e := s.Do(verb, rt, nil); e != nil {
			err = errors.Join(err, fmt.Errorf("next %s: %w", verb, e))
		}
	}
	return err
}

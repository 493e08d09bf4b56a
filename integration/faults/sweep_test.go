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

// sweepBudget is how long TestSweepAdd or TestSweepDel may take without FAULTS=all.
const sweepBudget = 3 * time.Second

// victimID is the container whose ADD or DEL is killed.
const victimID = "sweep-victim"

// killSweep kills a running chain at every change and between them, or at a sample of these points, and then calls the plugins as a runtime
// would.
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

// killCase is one case: verb, point, killed process, and the runtime's reaction.
type killCase struct {
	verb   string
	at     int
	policy string
	then   string
}

// The first call of a runtime after a kill.
const (
	thenDel     = "DEL"
	thenEmptied = "DEL with empty netns"
	thenCollect = "GC"
	thenAdd     = "ADD again"
)

// Without FAULTS=all, TestSweepAdd and TestSweepDel run a sample that is short enough for every test run.
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

// settleNode makes the state of the pod that stays attached look old, because GC ignores what is less than a second old, and creates the
// state that pods with a port share.
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

// runKilled runs the verb and kills the case's process.
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
		// The reactions repeat every 3 or 4 cases, of which only every nth runs. A stride that neither 2 nor 3 divides has each reaction in the
		// sample.
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

// measureVerb runs ADD and DEL without a kill. It returns the number of points of the verb, and the estimated duration of a case, which is
// twice that of ADD and DEL.
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

// casesOf returns a case for each point and reaction. Consecutive ones kill different processes.
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

// runCase kills the verb, calls the plugins as the runtime then does, and looks for leaked state. ADD and DEL of the container must work
// again.
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

// addAgain retries ADD without a DEL. It must succeed, unless bridge's record shows that bridge had finished before the kill.
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

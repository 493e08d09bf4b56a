// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// actorCount is the number of containers. The address pool is larger.
const actorCount = 4

// verbModel runs random verbs for several containers in parallel, and compares the results with the node's state, which it reads without
// code of Podlace.
type verbModel struct {
	t        *testing.T
	random   *rand.Rand
	pods     []*sandbox.Pod
	attached []bool // before the round
	harness.Tally
}

type verbMove struct {
	verb  string
	actor int
	keeps []bool // the valid attachments of a GC
	out   harness.Outcome
}

func modelConf() object {
	return harness.BridgeConf().With("name", "model", "bridge", "model0", "ipam.ranges", []any{[]any{object{"subnet": "10.197.7.0/29"}}})
}

// Verbs, containers and delays are the same in every run, because the seed is fixed (see kerneltest.Random).
func TestFaultInterleaving(t *testing.T) {
	t.Run("F-13 ADD, DEL and GC of the same and other containers interleave at random", func(t *testing.T) {
		m := &verbModel{t: t, random: kerneltest.Random(t), attached: make([]bool, actorCount)}
		for i := range actorCount {
			m.pods = append(m.pods, harness.NewPod(t, fmt.Sprintf("actor-%d", i)))
		}
		warm := harness.NewPod(t, "warm")
		for _, verb := range []string{"ADD", "DEL"} {
			harness.NewCall(verb, "bridge", warm, "warm", modelConf()).Run(t).OK(t)
		}
		before := harness.Watch(t, m.pods...)
		for round := 0; round < harness.Some(60, 1000) && !t.Failed(); round++ {
			m.Points++
			m.runRound(round)
		}
		for i := range m.pods {
			m.call(verbMove{verb: "DEL", actor: i}).Run(t).OK(t)
		}
		before.Clean(t, "DEL of all")
		m.Report(t)
	})
}

func (m *verbModel) call(s verbMove) harness.Call {
	pod := m.pods[s.actor]
	conf := modelConf()
	if s.verb == "GC" {
		valid := []any{}
		for i, keep := range s.keeps {
			if keep {
				valid = append(valid, map[string]any{"containerID": m.pods[i].Name, "ifname": "eth0"})
			}
		}
		conf = conf.With("cni.dev/valid-attachments", valid)
	}
	return harness.NewCall(s.verb, "bridge", pod, pod.Name, conf)
}

// runRound starts up to five random verbs at almost the same time and waits for their results.
func (m *verbModel) runRound(number int) {
	if m.random.IntN(2) == 0 {
		if err := kerneltest.Age(harness.StateDirs()...); err != nil { // GC keeps recent attachments
			m.t.Error(err)
		}
	}
	steps := make([]verbMove, 1+m.random.IntN(5))
	var wait sync.WaitGroup
	for i := range steps {
		steps[i] = verbMove{verb: []string{"ADD", "ADD", "ADD", "DEL", "DEL", "GC"}[m.random.IntN(6)], actor: m.random.IntN(actorCount)}
		for j := range actorCount {
			// GC gets a list of the valid attachments, as from a runtime, in which some are missing at random.
			steps[i].keeps = append(steps[i].keeps, m.attached[j] && m.random.IntN(6) > 0)
		}
		c, delay := m.call(steps[i]), time.Duration(m.random.IntN(20))*time.Millisecond
		wait.Go(func() {
			time.Sleep(delay) // the delay only mixes the order; no check depends on it
			var err error
			if steps[i].out, err = c.Start(); err != nil {
				m.t.Errorf("%s: %v", steps[i].verb, err)
			}
		})
	}
	wait.Wait()
	seen := map[string]int{}
	var leased []string
	for actor := range actorCount {
		address := m.checkActor(number, actor, steps)
		if m.attached[actor] = address != ""; address == "" {
			continue
		}
		leased = append(leased, address)
		if other, taken := seen[address]; taken {
			m.Duplicates++
			m.t.Errorf("round %d: %s is assigned to actors %d and %d", number, address, other, actor)
		}
		seen[address] = actor
	}
	if got := sorted(leaseFiles("model")); !slices.Equal(got, sorted(leased)) {
		m.Leaks++
		m.t.Errorf("round %d: leases %q, on pods %q", number, got, leased)
	}
}

// checkActor compares the results of one container's verbs with its state, and returns its address if it is attached.
func (m *verbModel) checkActor(number, actor int, steps []verbMove) string {
	adds, removals, may := []string{}, 0, 0
	for _, s := range steps {
		mine := s.actor == actor
		switch {
		case s.verb == "GC":
			s.out.OK(m.t)
			if !s.keeps[actor] {
				may++ // GC keeps a recent attachment, and an ADD may follow
			}
		case s.verb == "DEL" && mine:
			s.out.OK(m.t)
			removals++
		case mine && s.out.Exit == 0:
			adds = append(adds, harness.Addresses(m.t, harness.RawObject(m.t, s.out.Stdout))[0])
		case mine:
			s.out.Refused(m.t, harness.CodeTaken)
			rivals := slices.DeleteFunc(slices.Clone(steps), func(o verbMove) bool { return o.actor != actor || o.verb != "ADD" })
			if !m.attached[actor] && len(rivals) < 2 {
				m.t.Errorf("round %d: ADD of %d was refused without a reason: %s", number, actor, s.out.Stdout)
			}
		}
	}
	address := m.checkState(number, actor)
	switch most := removals + may + 1; {
	case len(adds) > most || m.attached[actor] && len(adds) > removals+may:
		m.t.Errorf("round %d: %d ADDs of %d succeeded, with %d removals", number, len(adds), actor, removals+may)
	case address != "" && !m.attached[actor] && !slices.Contains(adds, address):
		m.t.Errorf("round %d: actor %d has %s, which no ADD of it returned: %q", number, actor, address, adds)
	case address == "" && removals+may == 0 && (m.attached[actor] || len(adds) > 0):
		m.t.Errorf("round %d: actor %d is gone without a DEL", number, actor)
	case address != "" && removals > 0 && len(adds) == 0:
		m.t.Errorf("round %d: actor %d is still attached after DEL", number, actor)
	}
	return address
}

// checkState checks that a container is attached completely or not at all.
func (m *verbModel) checkState(number, actor int) (address string) {
	pod := m.pods[actor]
	err := pod.Do(func() error {
		link, err := net.InterfaceByName("eth0")
		if err != nil {
			return nil
		}
		list, err := link.Addrs()
		for _, a := range list {
			if ip, _, _ := net.ParseCIDR(a.String()); ip.To4() != nil {
				address = ip.String()
			}
		}
		if err == nil && address == "" {
			err = fmt.Errorf("eth0 without an address")
		}
		return err
	})
	records := 0
	files, _ := filepath.Glob("/run/podlace/model/bridge-*")
	for _, f := range files {
		var record struct{ ContainerID string }
		if data, e := os.ReadFile(f); e == nil && json.Unmarshal(data, &record) == nil && record.ContainerID == pod.Name {
			records++
		}
	}
	if attached := address != ""; err != nil || attached != (records == 1) {
		m.Leaks++
		m.t.Errorf("round %d: actor %d: address %q, %d records, %v: %s", number, actor, address, records, err, strings.Join(files, " "))
	}
	return address
}

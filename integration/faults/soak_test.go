// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"flag"
	"fmt"
	"hash"
	"hash/fnv"
	"io/fs"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/kernel/kerneltest"
	"github.com/podlace/podlace/pkg/sandbox"
	"github.com/podlace/podlace/pkg/store"
)

// tail is the number of last steps that a failed soak prints.
const tail = 15

// soakFlags declares the flags of TestSoak.
func soakFlags() {
	flag.Uint64("seed", 1, "TestSoak: seed of all random decisions")
	flag.Int("steps", 0, "TestSoak: stop after this many steps")
	flag.Duration("for", 0, "TestSoak: start new rounds during this time; without -steps and -for there is one round")
	flag.Int("pods", 24, "TestSoak: number of pods at the start of a round")
	flag.Int("audit", 200, "TestSoak: audit the whole node every this many steps")
}

func flagOf[T any](name string) T { return flag.Lookup(name).Value.(flag.Getter).Get().(T) }

// kind is one kind of step. A round performs each kind a fixed number of times. do returns false if no pod was suitable.
type kind struct {
	name  string
	times int
	do    func(*soak) bool
}

// soak is a node with the pods of two networks. Steps happen to it in an order that the seed decides. The random decisions of a step
// depend on the seed and the step's number. The steps' knowledge of the node depends on the previous steps only, never on their
// duration.
type soak struct {
	*testing.T
	seed     uint64
	random   *rand.Rand // source of the current step or round
	networks []*soakNetwork
	lan      *sandbox.Pod
	actors   []*actor
	pods     int // number of pods at the start of a round
	audits   int // number of steps between two audits
	dir      string
	title    string // title of the current step
	again    string // command that repeats another test than TestSoak

	flushed bool // rules or limits were flushed, and no verb has restored all of them since
	parts   bool // single elements are missing, which STATUS does not notice
	step    int
	last    []string
	order   hash.Hash32 // hash of all steps; equal in every run with the same seed
	done    map[string]int
	killed  int // number of killed plugins
	lives   int
	past    map[string]string // names of the links and keys of all pods so far, and their container IDs
	orphans map[string]bool   // names and addresses of pods that ended without a DEL since the last audit
	remade  int               // number of pods whose CHECK failed after the loss of a record
}

// TestSoak runs pods on a node with antiSpoof, both families, limits, hostPorts and both backends. Verbs, kills, flushes and losses of
// records happen at random. At every audit, all state of the node belongs to a live pod, and the traffic, hostPorts and limits of
// every live pod work. At the end the node is as it was before the first pod.
func TestSoak(t *testing.T) {
	steps, pods, audits := flagOf[int]("steps"), flagOf[int]("pods"), flagOf[int]("audit")
	if steps < 0 || pods < 1 || pods > 240 || audits < 1 {
		t.Fatalf("-steps %d -pods %d -audit %d: want steps from 0, pods from 1 to 240, audit from 1", steps, pods, audits)
	}
	s := newSoak(t, flagOf[uint64]("seed"), pods)
	s.audits = audits
	until := time.Now().Add(flagOf[time.Duration]("for"))
	fmt.Fprintf(t.Output(), "seed %d\n", s.seed)
	before := harness.Watch(t)
	for round := 0; round == 0 || steps == 0 && time.Now().Before(until) || s.step < steps; round++ {
		s.round(round, soakKinds(), steps)
		if t.Failed() {
			return
		}
	}
	s.audit()
	s.end(before)
	s.report(soakKinds(), steps == 0)
	if s.killed < s.step/40 {
		t.Errorf("%d steps with only %d kills", s.step, s.killed)
	}
}

func newSoak(t *testing.T, seed uint64, pods int) *soak {
	t.Helper()
	for _, program := range []string{"nft", "tc", "iptables", "ip6tables", "iptables-save"} {
		harness.Program(t, program)
	}
	harness.Need(t, "bridge", "host-local", "portmap", "bandwidth", "podlace")
	if err := errors.Join(kerneltest.FlushNFT(), os.RemoveAll(store.Root), os.RemoveAll("/var/lib/cni")); err != nil {
		t.Fatal(err)
	}
	s := &soak{T: t, seed: seed, pods: pods, dir: t.TempDir(), done: map[string]int{}, past: map[string]string{},
		orphans: map[string]bool{}, order: fnv.New32a(), lan: harness.NewLAN(t)}
	for i, backend := range []string{"nftables", "iptables"} {
		s.networks = append(s.networks, newSoakNetwork(t, i, backend))
	}
	for slot := range pods + 8 {
		s.actors = append(s.actors, &actor{slot: slot, network: s.networks[map[bool]int{true: 1}[slot%8 == 7]]})
	}
	server, err := harness.ServeClientAddress(s.lan, 7000)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	node, err := harness.Speak(nil, "[::]:7001")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = node.Close() })
	t.Cleanup(func() {
		for _, a := range s.actors {
			s.close(a)
		}
	})
	s.warm()
	return s
}

// warm attaches and detaches one pod of each network, which creates the shared state.
func (s *soak) warm() {
	s.Helper()
	for i := range s.networks {
		a := &actor{slot: len(s.actors) + i, network: s.networks[i], traits: traits{ports: true, limits: limit(100, 100)}}
		s.begin(a)
		s.add(a)
		s.del(a)
	}
	s.lives -= len(s.networks)
}

// replay returns the command that repeats the same steps.
func (s *soak) replay() string {
	if s.again != "" {
		return s.again
	}
	return fmt.Sprintf("run the same steps again: make soak ARGS='-seed %d -steps %d -pods %d -audit %d'", s.seed, s.step, s.pods, s.audits)
}

// draw creates a random source that depends only on the seed and a number.
func (s *soak) draw(stream, number int) {
	s.random = rand.New(rand.NewPCG(s.seed, uint64(stream)<<32|uint64(number)))
}

// round fills the node with pods, and performs the steps of all kinds in a random order. It stops at step number limit; 0 means no
// limit.
func (s *soak) round(number int, kinds []kind, limit int) {
	s.Helper()
	s.draw(1, number)
	var deck []kind
	for _, k := range kinds {
		deck = append(deck, slices.Repeat([]kind{k}, k.times)...)
	}
	s.random.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
	s.fill()
	for _, k := range deck {
		if s.Failed() || limit > 0 && s.step == limit {
			break
		}
		s.step++
		s.draw(2, s.step)
		s.title = k.name
		if k.do(s) {
			s.done[k.name]++
		} else {
			s.title += ", to no pod"
		}
		fmt.Fprintln(s.order, s.title)
		s.last = append(s.last[max(0, len(s.last)-tail+1):], fmt.Sprintf("%d %s", s.step, s.title))
		if !s.Failed() && s.step%s.audits == 0 {
			s.audit()
		}
	}
	if s.Failed() {
		s.Logf("the last steps:\n\t%s", strings.Join(s.last, "\n\t"))
		s.Log(s.replay())
	}
}

// says adds a text to the title of the step.
func (s *soak) says(format string, args ...any) { s.title += " " + fmt.Sprintf(format, args...) }

// end removes all pods, and checks that the node is as before the first pod.
func (s *soak) end(before *harness.Oracle) {
	s.Helper()
	s.draw(3, 0)
	for _, a := range s.live() {
		s.del(a)
	}
	s.owned(s.orphans)
	s.settle()
	s.owned(nil)
	s.warm()
	s.settle()
	before.Clean(s, "the end of all pods")
}

// report prints how often each kind of step was performed. A kind that never happened is an error.
func (s *soak) report(kinds []kind, all bool) {
	s.Helper()
	var counts []string
	for _, k := range kinds {
		counts = append(counts, fmt.Sprintf("%s %d", k.name, s.done[k.name]))
		if all && s.done[k.name] == 0 {
			s.Errorf("no step did this: %s", k.name)
		}
	}
	fmt.Fprintf(s.Output(), "%d steps (order %08x), %d lives, %d plugins killed, %d pods recreated; %s\n", s.step, s.order.Sum32(), s.lives, s.killed,
		s.remade, strings.Join(counts, ", "))
	if s.Failed() {
		s.Log(s.replay())
	}
}

// ignoreMissing returns err, or nil if the file did not exist.
func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

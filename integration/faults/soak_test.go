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
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/store"
)

// tailSteps is how many of the last steps a failed TestSoak prints.
const tailSteps = 15

func soakFlags() {
	flag.Uint64("seed", 1, "TestSoak: seed of all random decisions")
	flag.Int("steps", 0, "TestSoak: stop after this many steps")
	flag.Duration("for", 0, "TestSoak: start new rounds during this time; without -steps and -for there is one round")
	flag.Int("pods", 24, "TestSoak: number of pods at the start of a round")
	flag.Int("audit", 200, "TestSoak: audit the whole node every this many steps")
}

func flagOf[T any](name string) T { return flag.Lookup(name).Value.(flag.Getter).Get().(T) }

// stepKind is a kind of step, such as "ADD again", of which each round has a fixed number. do returns false if no pod was suitable.
type stepKind struct {
	name  string
	times int
	do    func(*soakRun) bool
}

// soakRun is a node with the pods of two networks. The order of steps depends on -seed, and the random decisions in a step on the seed and
// the step's number, not on how long earlier ones took. TestSoak is therefore reproducible.
type soakRun struct {
	*testing.T
	seed     uint64
	random   *rand.Rand // source of the current step or round
	networks []*soakNetwork
	lan      *sandbox.Pod
	actors   []*podSlot
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

// TestSoak runs pods with IPv4 and IPv6, antiSpoof, limits and hostPorts in a network with nftables and one with iptables. In random order,
// it runs and kills verbs, flushes rules, and deletes records. At every audit, all of Podlace's state belongs to a live pod, whose traffic,
// hostPorts and limits work. At the end, the node is as before the first pod.
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
		s.runRound(round, soakKinds(), steps)
		if t.Failed() {
			return
		}
	}
	s.auditNode()
	s.endSoak(before)
	s.printCounts(soakKinds(), steps == 0)
	if s.killed < s.step/40 {
		t.Errorf("%d steps with only %d kills", s.step, s.killed)
	}
}

func newSoak(t *testing.T, seed uint64, pods int) *soakRun {
	t.Helper()
	for _, program := range []string{"nft", "tc", "iptables", "ip6tables", "iptables-save"} {
		harness.Program(t, program)
	}
	harness.Need(t, "bridge", "host-local", "portmap", "bandwidth", "podlace")
	if err := errors.Join(kerneltest.FlushNFT(), os.RemoveAll(store.Root), os.RemoveAll("/var/lib/cni")); err != nil {
		t.Fatal(err)
	}
	s := &soakRun{T: t, seed: seed, pods: pods, dir: t.TempDir(), done: map[string]int{}, past: map[string]string{},
		orphans: map[string]bool{}, order: fnv.New32a(), lan: harness.NewLAN(t)}
	for i, backend := range []string{"nftables", "iptables"} {
		s.networks = append(s.networks, newSoakNetwork(t, i, backend))
	}
	for slot := range pods + 8 {
		s.actors = append(s.actors, &podSlot{slot: slot, network: s.networks[map[bool]int{true: 1}[slot%8 == 7]]})
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
			s.closePod(a)
		}
	})
	s.warmUp()
	return s
}

// warmUp attaches and detaches one pod of each network, which creates the state that its pods share.
func (s *soakRun) warmUp() {
	s.Helper()
	for i := range s.networks {
		a := &podSlot{slot: len(s.actors) + i, network: s.networks[i], podTraits: podTraits{ports: true, limits: mbitRates(100, 100)}}
		s.beginPod(a)
		s.addPod(a)
		s.delPod(a)
	}
	s.lives -= len(s.networks)
}

// replayCommand returns the command that repeats the same steps.
func (s *soakRun) replayCommand() string {
	if s.again != "" {
		return s.again
	}
	return fmt.Sprintf("run the same steps again: make soak ARGS='-seed %d -steps %d -pods %d -audit %d'", s.seed, s.step, s.pods, s.audits)
}

// setRandom sets a random source that depends only on the seed and the arguments.
func (s *soakRun) setRandom(stream, number int) {
	s.random = rand.New(rand.NewPCG(s.seed, uint64(stream)<<32|uint64(number)))
}

// runRound fills the node and performs all kinds of steps in random order, up to step number limit if it is not 0.
func (s *soakRun) runRound(number int, kinds []stepKind, limit int) {
	s.Helper()
	s.setRandom(1, number)
	var deck []stepKind
	for _, k := range kinds {
		deck = append(deck, slices.Repeat([]stepKind{k}, k.times)...)
	}
	s.random.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
	s.fillNode()
	for _, k := range deck {
		if s.Failed() || limit > 0 && s.step == limit {
			break
		}
		s.step++
		s.setRandom(2, s.step)
		s.title = k.name
		if k.do(s) {
			s.done[k.name]++
		} else {
			s.title += ", to no pod"
		}
		fmt.Fprintln(s.order, s.title)
		s.last = append(s.last[max(0, len(s.last)-tailSteps+1):], fmt.Sprintf("%d %s", s.step, s.title))
		if !s.Failed() && s.step%s.audits == 0 {
			s.auditNode()
		}
	}
	if s.Failed() {
		s.Logf("the last steps:\n\t%s", strings.Join(s.last, "\n\t"))
		s.Log(s.replayCommand())
	}
}

func (s *soakRun) addTitle(format string, args ...any) { s.title += " " + fmt.Sprintf(format, args...) }

// endSoak removes all pods and checks that the node is as before the first.
func (s *soakRun) endSoak(before *harness.Oracle) {
	s.Helper()
	s.setRandom(3, 0)
	for _, a := range s.livePods() {
		s.delPod(a)
	}
	s.checkOwned(s.orphans)
	s.settleNode()
	s.checkOwned(nil)
	s.warmUp()
	s.settleNode()
	before.Clean(s, "the end of all pods")
}

// printCounts prints how often each kind of step was performed. With all, each must have been.
func (s *soakRun) printCounts(kinds []stepKind, all bool) {
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
		s.Log(s.replayCommand())
	}
}

// ignoreMissing returns err, or nil if the file did not exist.
func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/integration/harness"
)

// lossKinds are the steps in which another program or an administrator removes state of Podlace.
func lossKinds() []stepKind {
	return []stepKind{
		{"flush of the ruleset", 2, func(s *soakRun) bool { s.flush(); return true }},
		{"flush and an ADD", 1, func(s *soakRun) bool { s.flush(); return s.stepAdd() }},
		{"flush and a DEL", 1, func(s *soakRun) bool { s.flush(); return s.stepDel() }},
		{"table deleted", 2, (*soakRun).stepDeleteTable},
		{"set flushed", 1, (*soakRun).stepFlushSet},
		{"element deleted", 1, (*soakRun).stepDeleteElement},
		{"iptables -F", 1, (*soakRun).stepFlushIPTables},
		{"qdisc deleted", 1, (*soakRun).stepDeleteQdisc},
		{"ifb deleted", 1, (*soakRun).stepDeleteIFB},
		{"record deleted", 2, func(s *soakRun) bool { return s.stepLoseRecord(os.Remove) }},
		{"record truncated", 2, func(s *soakRun) bool { return s.stepLoseRecord(s.truncate) }},
		{"notes deleted", 1, (*soakRun).stepLoseNotes},
		{"boot file deleted", 1, (*soakRun).stepLoseBootFile},
	}
}

func (s *soakRun) flush() {
	s.Helper()
	harness.Shell(s, "nft flush ruleset")
	s.flushed = true
}

func (s *soakRun) stepDeleteTable() bool {
	tables := slices.DeleteFunc(strings.Split(harness.Shell(s, "nft list tables"), "\n"), func(line string) bool {
		return !strings.Contains(line, " podlace_")
	})
	if len(tables) == 0 {
		s.flushed = true
		return true // a flush removed them
	}
	table := []string{"inet podlace_masquerade", "inet podlace_hostport", "inet podlace_loopback", "bridge podlace_guard"}[s.random.IntN(4)]
	s.addTitle("%s", table)
	_ = exec.Command("nft", "delete table "+table).Run() // the table may not exist
	s.flushed = true
	return true
}

// stepFlushSet empties a map or set, which STATUS does not notice.
func (s *soakRun) stepFlushSet() bool {
	sets := []string{"map inet podlace_hostport ports4", "map inet podlace_hostport ports6", "set inet podlace_hostport snat4"}
	set := sets[s.random.IntN(len(sets))]
	s.addTitle("%s", set)
	_ = exec.Command("nft", "flush "+set).Run()
	s.parts = true
	return true
}

// stepDeleteElement deletes one hostPort of a pod, which STATUS does not notice.
func (s *soakRun) stepDeleteElement() bool {
	a := s.randomPod(func(a *podSlot) bool { return a.ports && a.network.backend == "nftables" })
	if a == nil {
		return false
	}
	_ = exec.Command("nft", fmt.Sprintf("delete element inet podlace_hostport ports4 { tcp . %s }", a.port())).Run()
	s.parts = true
	return true
}

func (s *soakRun) stepFlushIPTables() bool {
	harness.Shell(s, "iptables -t nat -F; ip6tables -t nat -F")
	s.parts = true
	return true
}

func limited(a *podSlot) bool { return a.limits.Ingress > 0 && a.limits.Egress > 0 }

func (s *soakRun) stepDeleteQdisc() bool {
	a := s.randomPod(limited)
	if a == nil {
		return false
	}
	what := []string{"root", "clsact"}[s.random.IntN(2)]
	s.addTitle("%s", what)
	_ = exec.Command("tc", "qdisc", "del", "dev", a.key().HostVeth(), what).Run()
	s.flushed = true
	return true
}

func (s *soakRun) stepDeleteIFB() bool {
	a := s.randomPod(limited)
	if a == nil {
		return false
	}
	if _, device, err := harness.LimitsOf(a.key().HostVeth()); err == nil && device != "" {
		harness.Shell(s, "ip link del "+device)
	}
	s.flushed = true
	return true
}

func (s *soakRun) stepLoseRecord(lose func(path string) error) bool {
	a := s.randomPod(func(a *podSlot) bool { return len(a.lost) == 0 })
	if a == nil {
		return false
	}
	list := a.recordPlugins()
	plugin := list[s.random.IntN(len(list))]
	s.addTitle("%s", plugin)
	if err := lose(a.record(plugin)); err != nil {
		s.Errorf("%s: %v", a, err)
	}
	a.lost = append(a.lost, plugin)
	return true
}

func (s *soakRun) truncate(path string) error { return os.Truncate(path, int64(s.random.IntN(60))) }

// stepLoseNotes deletes a network's marker files, which the next ADD writes again.
func (s *soakRun) stepLoseNotes() bool {
	a := s.randomFree()
	if a == nil {
		return false
	}
	notes, err := filepath.Glob("/run/podlace/" + a.network.name + "/.[bm]*")
	if err != nil || len(notes) == 0 {
		s.Errorf("notes of %s: %q, %v", a.network.name, notes, err)
	}
	for _, note := range notes {
		if err := os.Remove(note); err != nil {
			s.Error(err)
		}
	}
	s.addPod(a)
	return true
}

func (s *soakRun) stepLoseBootFile() bool {
	n := s.networks[s.random.IntN(len(s.networks))]
	s.addTitle("%s", n.name)
	if err := os.Remove("/var/lib/cni/networks/" + n.name + "/podlace_boot"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.Error(err)
	}
	return true
}

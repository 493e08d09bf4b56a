// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/integration/harness"
)

// lossKinds are the losses that other programs and administrators cause.
func lossKinds() []kind {
	return []kind{
		{"flush of the ruleset", 2, func(s *soak) bool { s.flush(); return true }},
		{"flush and an ADD", 1, func(s *soak) bool { s.flush(); return s.stepAdd() }},
		{"flush and a DEL", 1, func(s *soak) bool { s.flush(); return s.stepDel() }},
		{"table deleted", 2, (*soak).stepDeleteTable},
		{"set flushed", 1, (*soak).stepFlushSet},
		{"element deleted", 1, (*soak).stepDeleteElement},
		{"iptables -F", 1, (*soak).stepFlushIPTables},
		{"qdisc deleted", 1, (*soak).stepDeleteQdisc},
		{"ifb deleted", 1, (*soak).stepDeleteIFB},
		{"record deleted", 2, func(s *soak) bool { return s.stepLoseRecord(os.Remove) }},
		{"record truncated", 2, func(s *soak) bool { return s.stepLoseRecord(s.truncate) }},
		{"notes deleted", 1, (*soak).stepLoseNotes},
		{"index deleted", 1, (*soak).stepLoseIndex},
	}
}

func (s *soak) flush() {
	s.Helper()
	harness.Shell(s, "nft flush ruleset")
	s.flushed = true
}

// stepDeleteTable deletes one of Podlace's tables.
func (s *soak) stepDeleteTable() bool {
	tables := slices.DeleteFunc(strings.Split(harness.Shell(s, "nft list tables"), "\n"), func(line string) bool {
		return !strings.Contains(line, " podlace_")
	})
	if len(tables) == 0 {
		s.flushed = true
		return true // a flush removed them
	}
	table := []string{"inet podlace_masquerade", "inet podlace_hostport", "inet podlace_loopback", "bridge podlace_guard"}[s.random.IntN(4)]
	s.says("%s", table)
	_ = exec.Command("nft", "delete table "+table).Run() // the table may not exist
	s.flushed = true
	return true
}

// stepFlushSet empties a map or a set. STATUS does not notice.
func (s *soak) stepFlushSet() bool {
	sets := []string{"map inet podlace_hostport ports4", "map inet podlace_hostport ports6", "set inet podlace_hostport snat4"}
	set := sets[s.random.IntN(len(sets))]
	s.says("%s", set)
	_ = exec.Command("nft", "flush "+set).Run()
	s.parts = true
	return true
}

// stepDeleteElement deletes one hostPort of a pod. STATUS does not notice.
func (s *soak) stepDeleteElement() bool {
	a := s.some(func(a *actor) bool { return a.ports && a.network.backend == "nftables" })
	if a == nil {
		return false
	}
	_ = exec.Command("nft", fmt.Sprintf("delete element inet podlace_hostport ports4 { tcp . %s }", a.port())).Run()
	s.parts = true
	return true
}

func (s *soak) stepFlushIPTables() bool {
	harness.Shell(s, "iptables -t nat -F; ip6tables -t nat -F")
	s.parts = true
	return true
}

func limited(a *actor) bool { return a.limits.Ingress > 0 && a.limits.Egress > 0 }

// stepDeleteQdisc deletes one of the two qdiscs of a pod's link.
func (s *soak) stepDeleteQdisc() bool {
	a := s.some(limited)
	if a == nil {
		return false
	}
	what := []string{"root", "clsact"}[s.random.IntN(2)]
	s.says("%s", what)
	_ = exec.Command("tc", "qdisc", "del", "dev", a.key().HostVeth(), what).Run()
	s.flushed = true
	return true
}

func (s *soak) stepDeleteIFB() bool {
	a := s.some(limited)
	if a == nil {
		return false
	}
	if _, device, err := harness.LimitsOf(a.key().HostVeth()); err == nil && device != "" {
		harness.Shell(s, "ip link del "+device)
	}
	s.flushed = true
	return true
}

// stepLoseRecord removes or damages a record of a pod.
func (s *soak) stepLoseRecord(lose func(path string) error) bool {
	a := s.some(func(a *actor) bool { return len(a.lost) == 0 })
	if a == nil {
		return false
	}
	list := a.plugins()
	plugin := list[s.random.IntN(len(list))]
	s.says("%s", plugin)
	if err := lose(a.record(plugin)); err != nil {
		s.Errorf("%s: %v", a, err)
	}
	a.lost = append(a.lost, plugin)
	return true
}

func (s *soak) truncate(path string) error { return os.Truncate(path, int64(s.random.IntN(60))) }

// stepLoseNotes deletes the marks of a network. The next ADD writes them again.
func (s *soak) stepLoseNotes() bool {
	a := s.free()
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
	s.add(a)
	return true
}

func (s *soak) stepLoseIndex() bool {
	n := s.networks[s.random.IntN(len(s.networks))]
	s.says("%s", n.name)
	if err := os.RemoveAll("/var/lib/cni/networks/.podlace/" + n.name); err != nil {
		s.Error(err)
	}
	return true
}

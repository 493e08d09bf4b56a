// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
)

// auditNode restores lost state with the documented commands, and checks the whole node.
func (s *soakRun) auditNode() {
	s.Helper()
	if s.Failed() {
		return
	}
	s.checkOwned(s.orphans)
	s.settleNode()
	s.recreateIncomplete()
	s.checkOwned(nil)
	s.checkElements()
	s.checkLimits()
	s.forEachPod(s.livePods(), s.checkTraffic)
	s.checkNeighbours()
	s.measureLimits()
	if s.Failed() {
		s.Logf("at the audit after step %d", s.step)
	}
}

// settleNode restores flushed rules and removes the state of pods that ended without a DEL.
func (s *soakRun) settleNode() {
	s.Helper()
	if err := kerneltest.Age(harness.StateDirs()...); err != nil {
		s.Fatal(err)
	}
	if err := s.collectAll(); err != nil {
		s.Errorf("GC: %v", err)
	}
	if err := s.runReload(); err != nil {
		s.Error(err)
	}
	s.flushed, s.parts = false, false
	clear(s.orphans)
}

// recreateIncomplete replaces pods whose CHECK fails, as the kubelet does after a restart of CRI-O: after a lost record and a flush, no
// command can restore a pod's rules.
func (s *soakRun) recreateIncomplete() {
	s.Helper()
	live := s.livePods()
	whole := make([]bool, len(s.actors))
	s.forEachPod(live, func(a *podSlot) { whole[a.slot] = s.checkPod(a) })
	for _, a := range live {
		if whole[a.slot] {
			continue
		}
		s.remade++
		s.delPod(a)
		s.beginPod(a)
		s.addPod(a)
	}
}

// checkOwned checks that every container ID, interface name, address and key hash on the node is that of a live pod or of an orphan, which
// ended without a DEL and waits for GC. After GC, each chain of the iptables backend must be the target of a jump.
func (s *soakRun) checkOwned(orphans map[string]bool) {
	s.Helper()
	known := s.knownIdentities()
	maps.Copy(known, orphans)
	for _, path := range s.statePaths() { // after a killed ADD, only the lease contains the addresses
		lease, err := os.ReadFile(path)
		if container, _, ok := strings.Cut(string(lease), "\r\n"); err == nil && ok && orphans[container] {
			known[filepath.Base(path)] = true
		}
	}
	all := s.nodeInventory()
	for _, chain := range regexp.MustCompile(`(?m)^:(CNI-(?:DN-|SN-)?[0-9a-f]{8,}) `).FindAllStringSubmatch(all, -1) {
		if orphans == nil && !strings.Contains(all, " -j "+chain[1]+"\n") {
			s.Errorf("no rule leads to the chain %s", chain[1])
		}
	}
	recorded := regexp.MustCompile(`"containerID":"([^"]+)"`)
	for line := range strings.Lines(all) {
		if of := recorded.FindStringSubmatch(line); of != nil && orphans[of[1]] {
			continue // a killed DEL releases the addresses before it removes the record
		}
		for _, group := range identityPattern().FindAllStringSubmatch(line, -1) {
			word := group[slices.IndexFunc(group[1:], func(part string) bool { return part != "" })+1]
			if !known[word] {
				known[word] = true // report each word once
				s.Errorf("%s %s belongs to no live pod: %s", word, s.past[word], strings.TrimSpace(line))
			}
		}
	}
	s.checkFiles(known)
	s.checkProcesses()
}

// identityPattern matches container IDs, addresses, names of veths and ifb devices, and key hashes in element comments and file names.
func identityPattern() *regexp.Regexp {
	return regexp.MustCompile(`\b(veth[0-9a-f]{11}|bwp[0-9a-f]+)\b|comment "([0-9a-f]{16})\b|(?:bridge|portmap|bandwidth)-([0-9a-f]{16})\b` +
		`|localhost/\S+/([0-9a-f]{16})\b|\b(soak-\d+-\d+)\b|\b(10\.9[12]\.0\.\d+|fd9[12]::[0-9a-f]*)(?:\b|$)`)
}

// knownIdentities returns the identifiers of live pods and the networks' addresses.
func (s *soakRun) knownIdentities() map[string]bool {
	s.Helper()
	known := map[string]bool{"soak-lan": true}
	for _, n := range s.networks {
		for _, word := range []string{n.gateway4, n.gateway6, n.pods4 + "0", n.pods4 + "255", n.pods6} {
			known[word] = true
		}
	}
	for _, a := range s.livePods() {
		for _, word := range append(a.podNames(), a.ips...) {
			known[word] = true
		}
	}
	return known
}

// nodeInventory returns the node's links, routes and rules, and the state files with their contents, except host-local's list of released
// addresses, which stays on purpose.
func (s *soakRun) nodeInventory() string {
	s.Helper()
	out := harness.Shell(s, "ip -o link; ip -o -6 route; ip -o -4 route; nft list ruleset; iptables-save; ip6tables-save")
	for _, path := range s.statePaths() {
		out += path + "\n"
		name := strings.TrimPrefix(filepath.Base(path), ".tmp-")
		if name == "podlace_boot" || strings.HasPrefix(name, "last_reserved_ip.") || slices.Contains(s.unreadableRecords(), path) {
			continue
		}
		if content, err := os.ReadFile(path); err == nil {
			out += strings.Map(printable, string(content)) + "\n"
		}
	}
	return out
}

func printable(r rune) rune {
	if r < ' ' {
		return ' '
	}
	return r
}

func (s *soakRun) statePaths() (list []string) {
	for _, dir := range harness.StateDirs() {
		_ = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				list = append(list, path)
			}
			return nil
		})
	}
	return list
}

// checkFiles checks that docs/dev/STATE.md lists every state file, and that each live pod, but no other one, has records and leases.
func (s *soakRun) checkFiles(known map[string]bool) {
	s.Helper()
	harmless := regexp.MustCompile(harness.Harmless + `|/\.masqueraded$|/\.gateway-[^/]+$|^/run/podlace/\.([a-z_]+|logged-[^/]+)$`)
	found := map[string]bool{}
	for _, path := range s.statePaths() {
		// A killed verb can leave a temporary file, which the file's next writer replaces.
		name, temporary := strings.CutPrefix(filepath.Base(path), ".tmp-")
		path := filepath.Join(filepath.Dir(path), name)
		hash := name[strings.LastIndex(name, "-")+1:]
		switch {
		case strings.Contains(path, "/networks/soak") && known[name], strings.HasPrefix(path, "/run/podlace/soak") && known[hash],
			strings.Contains(path, "/.localhost/") && known[name]:
			found[path] = !temporary || found[path]
		case !harmless.MatchString(path):
			s.Errorf("the file %s belongs to no live pod, network or lock", path)
		}
	}
	for _, a := range s.livePods() {
		for _, ip := range a.ips {
			if path := "/var/lib/cni/networks/" + a.network.name + "/" + ip; !found[path] {
				s.Errorf("%s has no lease %s", a, path)
			}
		}
		for _, plugin := range a.recordPlugins() {
			if path := a.record(plugin); !found[path] && !slices.Contains(a.lost, plugin) {
				s.Errorf("%s has no record %s", a, path)
			}
		}
	}
}

// checkProcesses checks that no plugin of this node is running. Plugins have its mount namespace.
func (s *soakRun) checkProcesses() {
	s.Helper()
	here, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		s.Fatal(err)
	}
	harness.Await(s, "the end of all plugins", func() bool {
		found, err := filepath.Glob("/proc/[0-9]*")
		return err == nil && !slices.ContainsFunc(found, func(process string) bool {
			program, _ := os.Readlink(process + "/exe")
			mounts, _ := os.Readlink(process + "/ns/mnt")
			return mounts == here && slices.Contains([]string{harness.BinDir(), harness.FaultDir()}, filepath.Dir(program))
		})
	})
}

// checkLimits compares the qdiscs of each pod with its limits.
func (s *soakRun) checkLimits() {
	s.Helper()
	for _, a := range s.livePods() {
		if got, device, err := harness.LimitsOf(a.key().HostVeth()); err != nil || got != a.limits || (device != "") != (got.Egress > 0) {
			s.Errorf("%s has the limits %+v by %q, %v; want %+v", a, got, device, err, a.limits)
		}
	}
	want := s.count(func(a *podSlot) bool { return a.limits.Egress > 0 })
	if got := strings.Count(harness.Shell(s, "ip -o link show type ifb"), "bwp"); got != want {
		s.Errorf("%d ifb devices, want %d, one for each pod with an egress limit", got, want)
	}
}

func (s *soakRun) count(fits func(*podSlot) bool) int {
	return len(slices.DeleteFunc(s.livePods(), func(a *podSlot) bool { return !fits(a) }))
}

// checkElements checks that the nftables maps and sets have one element for each hostPort of each pod.
func (s *soakRun) checkElements() {
	s.Helper()
	want := 2 * s.count(func(a *podSlot) bool { return a.ports && a.network.backend == "nftables" }) // TCP and UDP
	for _, set := range []string{"map inet podlace_hostport ports4", "map inet podlace_hostport ports6", "set inet podlace_hostport snat4",
		"set inet podlace_hostport snat6"} {
		if got := strings.Count(harness.Shell(s, "nft list "+set), "comment"); got != want {
			s.Errorf("%s has %d elements, want %d", set, got, want)
		}
	}
}

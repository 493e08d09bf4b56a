// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
	attachments "github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

type soakNetwork struct {
	name, backend   string
	conflist        []byte
	cache           string
	pods4, gateway4 string // address prefix of the pods, and the bridge's address
	pods6, gateway6 string
}

func newSoakNetwork(t *testing.T, i int, backend string) *soakNetwork {
	t.Helper()
	n := &soakNetwork{name: fmt.Sprint("soak", i), backend: backend, cache: t.TempDir(),
		pods4: fmt.Sprintf("10.%d.0.", 91+i), pods6: fmt.Sprintf("fd%d::", 91+i)}
	n.gateway4, n.gateway6 = n.pods4+"1", n.pods6+"1"
	n.conflist = []byte(strings.NewReplacer(`"ipMasq":true`, `"ipMasq":true,"antiSpoof":true`, `"chain0"`, fmt.Sprintf(`"soak%d"`, i),
		`"name":"chain"`, fmt.Sprintf(`"name":%q`, n.name), "10.71.0.", n.pods4, "fd71::", n.pods6).
		Replace(string(harness.ChainOf(t, "1.1.0", backend))))
	return n
}

// doVerb runs a verb of the chain, with exec or, if it is nil, with the programs of bin/.
func (n *soakNetwork) doVerb(verb string, rt *libcni.RuntimeConf, exec invoke.Exec, valid ...types.GCAttachment) (types.Result, error) {
	network, err := harness.OpenNetwork(n.conflist, n.cache, exec)
	if err != nil {
		return nil, err
	}
	return network.Do(verb, rt, valid)
}

// podTraits are the hostPorts and limits that a pod requests.
type podTraits struct {
	ports  bool
	limits harness.Rates
}

// podSlot is a place for one pod at a time. The hostPort depends only on the slot.
type podSlot struct {
	slot, lives int
	network     *soakNetwork
	podTraits
	pod     *sandbox.Pod // nil while the slot is empty
	rt      *libcni.RuntimeConf
	ips     []string
	speaker *harness.Speaker // nil unless the pod is attached
	lost    []string         // plugins whose records of the pod are lost
}

func (a *podSlot) String() string { return a.rt.ContainerID }

func (a *podSlot) port() string { return fmt.Sprint(20000 + a.slot) }

func (a *podSlot) key() attachments.Key {
	return attachments.Key{Network: a.network.name, ContainerID: a.rt.ContainerID, IfName: a.rt.IfName}
}

// podNames returns what identifies the pod on the node: its container ID, its link names, and the hash of its key.
func (a *podSlot) podNames() []string {
	key := a.key()
	return []string{a.rt.ContainerID, key.HostVeth(), key.Hash(), "bwp" + key.ReferenceHash()[:12]}
}

func (a *podSlot) record(plugin string) string {
	return filepath.Join("/run/podlace", a.network.name, plugin+"-"+a.key().Hash())
}

func (a *podSlot) recordPlugins() []string {
	list := []string{"bridge"}
	if a.ports {
		list = append(list, "portmap")
	}
	if a.limits != (harness.Rates{}) {
		list = append(list, "bandwidth")
	}
	return list
}

func (s *soakRun) livePods() []*podSlot {
	return slices.DeleteFunc(slices.Clone(s.actors), func(a *podSlot) bool { return a.speaker == nil })
}

// randomPod returns a random attached pod that fits, or nil.
func (s *soakRun) randomPod(fits func(*podSlot) bool) *podSlot {
	list := slices.DeleteFunc(s.livePods(), func(a *podSlot) bool { return fits != nil && !fits(a) })
	if len(list) == 0 {
		return nil
	}
	a := list[s.random.IntN(len(list))]
	s.addTitle("%s", a)
	return a
}

// randomFree creates a pod in a random empty slot, or returns nil.
func (s *soakRun) randomFree() *podSlot {
	list := slices.DeleteFunc(slices.Clone(s.actors), func(a *podSlot) bool { return a.pod != nil })
	if len(list) == 0 {
		return nil
	}
	a := list[s.random.IntN(len(list))]
	s.drawTraits(a)
	s.beginPod(a)
	s.addTitle("%s", a)
	return a
}

func (s *soakRun) drawTraits(a *podSlot) {
	rates := []harness.Rates{{}, {}, mbitRates(40, 20), mbitRates(0, 50), mbitRates(100, 0), mbitRates(200, 80)}
	a.podTraits = podTraits{ports: s.random.IntN(4) > 0, limits: rates[s.random.IntN(len(rates))]}
}

func (s *soakRun) beginPod(a *podSlot) {
	s.Helper()
	s.lives++
	a.lives++
	pod, err := sandbox.NewPod(fmt.Sprintf("soak-%d-%d", a.slot, a.lives))
	if err != nil {
		s.Fatal(err)
	}
	caps := map[string]any{}
	if a.ports {
		caps = harness.Mappings(harness.Port(20000+a.slot, 80, "tcp"), harness.Port(20000+a.slot, 80, "udp"))
	}
	limits := object{}
	for way, rate := range map[string]int{"ingress": a.limits.Ingress, "egress": a.limits.Egress} {
		if rate > 0 {
			limits[way+"Rate"], limits[way+"Burst"] = rate*1_000_000, math.MaxUint32
		}
	}
	if len(limits) > 0 {
		caps["bandwidth"] = limits
	}
	a.pod, a.rt, a.ips, a.lost = pod, harness.Named(pod, caps), nil, nil
	for _, word := range a.podNames() {
		s.past[word] = pod.Name
	}
}

// addPod attaches the pod of a slot and starts a server in it.
func (s *soakRun) addPod(a *podSlot) {
	s.Helper()
	result, err := a.network.doVerb("ADD", a.rt, nil)
	if err != nil {
		s.Errorf("ADD of %s: %v", a, err)
		return
	}
	s.attached(a, result)
}

func (s *soakRun) attached(a *podSlot, result types.Result) {
	s.Helper()
	a.ips = harness.Addresses(s, harness.RawObject(s, string(harness.Encode(result))))
	var err error
	if a.speaker, err = harness.Speak(a.pod, "[::]:80"); err != nil {
		s.Error(err)
	}
}

// delPod detaches and removes the pod of a slot.
func (s *soakRun) delPod(a *podSlot) {
	s.Helper()
	s.mustDel(a)
	s.closePod(a)
}

func (s *soakRun) mustDel(a *podSlot) {
	s.Helper()
	if _, err := a.network.doVerb("DEL", a.rt, nil); err != nil {
		s.Errorf("DEL of %s: %v", a, err)
	}
}

// abandonPod removes the namespace of a pod whose DEL is missing or failed.
func (s *soakRun) abandonPod(a *podSlot) {
	s.Helper()
	for _, word := range append(a.podNames(), a.ips...) {
		s.orphans[word] = true
	}
	s.closePod(a)
}

func (s *soakRun) closePod(a *podSlot) {
	s.Helper()
	if a.pod == nil {
		return
	}
	if a.speaker != nil {
		_ = a.speaker.Close()
	}
	if err := a.pod.Close(); err != nil {
		s.Error(err)
	}
	a.pod, a.speaker = nil, nil
}

// fillNode attaches pods, four at a time, until the node has enough.
func (s *soakRun) fillNode() {
	s.Helper()
	var list []*podSlot
	for len(s.livePods())+len(list) < s.pods {
		a := s.randomFree()
		if a == nil {
			break
		}
		list = append(list, a)
	}
	s.forEachPod(list, s.addPod)
}

// forEachPod calls f for the pods, four at a time.
func (s *soakRun) forEachPod(list []*podSlot, f func(*podSlot)) {
	var wait sync.WaitGroup
	tickets := make(chan struct{}, 4)
	for _, a := range list {
		tickets <- struct{}{}
		wait.Go(func() { f(a); <-tickets })
	}
	wait.Wait()
}

// collectAll runs GC for each network, with the live pods as valid attachments.
func (s *soakRun) collectAll() error {
	var errs []error
	for _, n := range s.networks {
		var valid []types.GCAttachment
		for _, a := range s.livePods() {
			if a.network == n {
				valid = append(valid, types.GCAttachment{ContainerID: a.rt.ContainerID, IfName: a.rt.IfName})
			}
		}
		_, err := n.doVerb("GC", nil, nil, valid...)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (s *soakRun) runStatus() error {
	var errs []error
	for _, n := range s.networks {
		_, err := n.doVerb("STATUS", nil, nil)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// runReload runs `podlace reload` and ignores errors about records that the test has truncated or deleted.
func (s *soakRun) runReload() error {
	out, err := exec.Command(filepath.Join(harness.BinDir(), "podlace"), "reload").CombinedOutput()
	if err != nil && strings.Contains(string(out), " cannot be read") && len(s.unreadableRecords()) > 0 {
		return nil
	}
	if err != nil && strings.Contains(string(out), "because their records below /run/podlace are lost") &&
		slices.ContainsFunc(s.livePods(), func(a *podSlot) bool { return len(a.lost) > 0 }) {
		return nil
	}
	if err != nil {
		err = fmt.Errorf("podlace reload: %w: %s", err, out)
	}
	return err
}

// unreadableRecords returns the paths of truncated records.
func (s *soakRun) unreadableRecords() (paths []string) {
	for _, a := range s.livePods() {
		for _, plugin := range a.lost {
			if _, err := os.Stat(a.record(plugin)); err == nil {
				paths = append(paths, a.record(plugin))
			}
		}
	}
	return paths
}

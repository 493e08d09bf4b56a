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
	"github.com/podlace/podlace/pkg/sandbox"
)

// soakNetwork is one network of the node.
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

// do runs a verb of the chain with the programs of bin/, or with exec if it is not nil.
func (n *soakNetwork) do(verb string, rt *libcni.RuntimeConf, exec invoke.Exec, valid ...types.GCAttachment) (types.Result, error) {
	network, err := harness.OpenNetwork(n.conflist, n.cache, exec)
	if err != nil {
		return nil, err
	}
	return network.Do(verb, rt, valid)
}

// traits are the features that a pod requests.
type traits struct {
	ports  bool
	limits harness.Rates
}

// actor is a slot in which pods live one after another. Each of these pods has the slot's hostPort, if the slot has one.
type actor struct {
	slot, lives int
	network     *soakNetwork
	traits
	pod     *sandbox.Pod // nil while the slot is empty
	rt      *libcni.RuntimeConf
	ips     []string
	speaker *harness.Speaker // nil unless the pod is attached
	lost    []string         // plugins whose records of the pod are lost
}

func (a *actor) String() string { return a.rt.ContainerID }

func (a *actor) port() string { return fmt.Sprint(20000 + a.slot) }

func (a *actor) key() attachments.Key {
	return attachments.Key{Network: a.network.name, ContainerID: a.rt.ContainerID, IfName: a.rt.IfName}
}

// names returns the words that identify the pod on the node: its container ID, its links, and the hash of its key.
func (a *actor) names() []string {
	key := a.key()
	return []string{a.rt.ContainerID, key.HostVeth(), key.Hash(), "bwp" + key.ReferenceHash()[:12]}
}

func (a *actor) record(plugin string) string {
	return filepath.Join("/run/podlace", a.network.name, plugin+"-"+a.key().Hash())
}

// plugins returns the plugins that keep a record of the pod.
func (a *actor) plugins() []string {
	list := []string{"bridge"}
	if a.ports {
		list = append(list, "portmap")
	}
	if a.limits != (harness.Rates{}) {
		list = append(list, "bandwidth")
	}
	return list
}

// live returns the attached pods.
func (s *soak) live() []*actor {
	return slices.DeleteFunc(slices.Clone(s.actors), func(a *actor) bool { return a.speaker == nil })
}

// some draws an attached pod that fits; nil if there is none.
func (s *soak) some(fits func(*actor) bool) *actor {
	list := slices.DeleteFunc(s.live(), func(a *actor) bool { return fits != nil && !fits(a) })
	if len(list) == 0 {
		return nil
	}
	a := list[s.random.IntN(len(list))]
	s.says("%s", a)
	return a
}

// free draws an empty slot and creates a pod in it; nil if there is none.
func (s *soak) free() *actor {
	list := slices.DeleteFunc(slices.Clone(s.actors), func(a *actor) bool { return a.pod != nil })
	if len(list) == 0 {
		return nil
	}
	a := list[s.random.IntN(len(list))]
	s.drawTraits(a)
	s.begin(a)
	s.says("%s", a)
	return a
}

func (s *soak) drawTraits(a *actor) {
	rates := []harness.Rates{{}, {}, limit(40, 20), limit(0, 50), limit(100, 0), limit(200, 80)}
	a.traits = traits{ports: s.random.IntN(4) > 0, limits: rates[s.random.IntN(len(rates))]}
}

// begin creates the next pod of a slot.
func (s *soak) begin(a *actor) {
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
	for _, word := range a.names() {
		s.past[word] = pod.Name
	}
}

// add attaches the pod of a slot, and starts its server.
func (s *soak) add(a *actor) {
	s.Helper()
	result, err := a.network.do("ADD", a.rt, nil)
	if err != nil {
		s.Errorf("ADD of %s: %v", a, err)
		return
	}
	s.attached(a, result)
}

func (s *soak) attached(a *actor, result types.Result) {
	s.Helper()
	a.ips = harness.Addresses(s, harness.RawObject(s, string(harness.Encode(result))))
	var err error
	if a.speaker, err = harness.Speak(a.pod, "[::]:80"); err != nil {
		s.Error(err)
	}
}

// del detaches the pod of a slot, and removes the pod.
func (s *soak) del(a *actor) {
	s.Helper()
	s.mustDel(a)
	s.close(a)
}

// mustDel runs a DEL that must succeed.
func (s *soak) mustDel(a *actor) {
	s.Helper()
	if _, err := a.network.do("DEL", a.rt, nil); err != nil {
		s.Errorf("DEL of %s: %v", a, err)
	}
}

// abandon removes the namespace of a pod whose DEL never comes or has failed.
func (s *soak) abandon(a *actor) {
	s.Helper()
	for _, word := range append(a.names(), a.ips...) {
		s.orphans[word] = true
	}
	s.close(a)
}

// close removes the namespace of a pod.
func (s *soak) close(a *actor) {
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

// fill attaches pods, four in parallel, up to the required number.
func (s *soak) fill() {
	s.Helper()
	var list []*actor
	for len(s.live())+len(list) < s.pods {
		a := s.free()
		if a == nil {
			break
		}
		list = append(list, a)
	}
	s.each(list, s.add)
}

// each calls f for each of the pods, four in parallel.
func (s *soak) each(list []*actor, f func(*actor)) {
	var wait sync.WaitGroup
	tickets := make(chan struct{}, 4)
	for _, a := range list {
		tickets <- struct{}{}
		wait.Go(func() { f(a); <-tickets })
	}
	wait.Wait()
}

// collect runs GC of all networks with the live pods as valid attachments.
func (s *soak) collect() error {
	var errs []error
	for _, n := range s.networks {
		var valid []types.GCAttachment
		for _, a := range s.live() {
			if a.network == n {
				valid = append(valid, types.GCAttachment{ContainerID: a.rt.ContainerID, IfName: a.rt.IfName})
			}
		}
		_, err := n.do("GC", nil, nil, valid...)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// status runs STATUS of all networks.
func (s *soak) status() error {
	var errs []error
	for _, n := range s.networks {
		_, err := n.do("STATUS", nil, nil)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// reload runs podlace reload, which names unreadable records.
func (s *soak) reload() error {
	out, err := exec.Command(filepath.Join(harness.BinDir(), "podlace"), "reload").CombinedOutput()
	if err != nil && strings.Contains(string(out), " cannot be read") && len(s.unreadable()) > 0 {
		return nil
	}
	if err != nil {
		err = fmt.Errorf("podlace reload: %w: %s", err, out)
	}
	return err
}

// unreadable returns the truncated records.
func (s *soak) unreadable() (paths []string) {
	for _, a := range s.live() {
		for _, plugin := range a.lost {
			if _, err := os.Stat(a.record(plugin)); err == nil {
				paths = append(paths, a.record(plugin))
			}
		}
	}
	return paths
}

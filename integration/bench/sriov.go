// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness/card"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/store"
)

const (
	groupSRIOV     = "sriov"
	nothingPackage = "github.com/podlace/podlace/integration/bench/nothing"

	podWithVF = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=" + podUID // the pod of package card
	plainPod  = "IgnoreUnknown=1;K8S_POD_NAMESPACE=bench;K8S_POD_NAME=plain"
	podUID    = "0b2c8a9e-5d0e-4f5e-8d0c-000000000001"
)

// fakeTest stands in for *testing.T in calls of package card. Error and Fatal panic, which ends the measurement; end runs what card
// registered with Cleanup.
type fakeTest struct {
	testing.TB
	folder string
	ends   []func()
}

func (s *fakeTest) Helper()                   {}
func (s *fakeTest) Name() string              { return groupSRIOV }
func (s *fakeTest) Cleanup(f func())          { s.ends = append(s.ends, f) }
func (s *fakeTest) Error(args ...any)         { panic(fmt.Sprint(args...)) }
func (s *fakeTest) Fatal(args ...any)         { panic(fmt.Sprint(args...)) }
func (s *fakeTest) Errorf(f string, a ...any) { panic(fmt.Sprintf(f, a...)) }
func (s *fakeTest) Fatalf(f string, a ...any) { panic(fmt.Sprintf(f, a...)) }

func (s *fakeTest) TempDir() string {
	dir, err := os.MkdirTemp(s.folder, "card")
	if err != nil {
		panic(err)
	}
	return dir
}

// callSafely returns the message of a call of Fatal as an error.
func (s *fakeTest) callSafely(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	return f()
}

func (s *fakeTest) end() error {
	return s.callSafely(func() error {
		for len(s.ends) > 0 {
			last := s.ends[len(s.ends)-1]
			s.ends = s.ends[:len(s.ends)-1]
			last()
		}
		return nil
	})
}

// measureSRIOV measures sriov with veth interfaces in place of VFs, which the kernel moves between namespaces in the same way.
func (r *report) measureSRIOV(o options, n nodes) {
	if err := n.measureSRIOV(r, o); err != nil {
		r.fail(groupSRIOV, err)
	}
}

func (n nodes) measureSRIOV(r *report, o options) (err error) {
	if err := build("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(o.temporary, "nothing"), nothingPackage); err != nil {
		return err
	}
	node, err := n.open("node-sriov")
	if err != nil {
		return err
	}
	s := &fakeTest{folder: o.temporary}
	defer func() { err = errors.Join(err, node.Do(s.end)) }()
	var c *card.Card
	err = node.Do(func() error { return s.callSafely(func() error { c = card.New(s, 1); return nil }) })
	if err != nil {
		return err
	}
	if err := n.measureWithoutVF(r, o, ""); err != nil {
		return err
	}
	if err := n.measureVF(r, o); err != nil {
		return err
	}
	if err := node.Do(func() error { return writeClaims(o.temporary) }); err != nil {
		return err
	}
	c.Claim(o.temporary)
	if err := n.measureWithoutVF(r, o, fmt.Sprintf(", beside %d claims", claims)); err != nil {
		return err
	}
	if err := n.measureClaim(r, o); err != nil {
		return err
	}
	return measureJournal(r, o)
}

// lookupContender adds the pod's name and UID to CNI_ARGS, with which the plugin asks for the pod's devices.
type lookupContender struct {
	*chain
	args string
}

func (a lookupContender) run(verb string, exec processRunner) error {
	return a.chain.run(verb, func(inv invocation) ([]byte, error) {
		inv.env = append(inv.env, "CNI_ARGS="+a.args) // the last value takes effect
		return exec(inv)
	})
}

// afterOthers returns the configuration of a plugin that runs after a main plugin.
func afterOthers(kind string, pod *sandbox.Pod) pluginConf {
	return pluginConf{"type": kind, "resources": []string{card.Resource}, "kubeletDir": "/nonexistent",
		"prevResult": map[string]any{"cniVersion": cniVersion,
			"interfaces": []any{map[string]string{"name": "veth0"}, map[string]string{"name": podInterface, "sandbox": pod.Path}},
			"ips":        []any{map[string]any{"address": "10.58.0.2/16", "gateway": "10.58.0.1", "interface": 1}}}}
}

// measureWithoutVF measures a pod without VFs, as most pods of a cluster are. Package card simulates the device plugin.
func (n nodes) measureWithoutVF(r *report, o options, beside string) error {
	const idle, asking = "nothing", "sriov"
	entries := map[string]*contenderEntry{}
	var all []*contenderEntry
	for program, folder := range map[string]string{idle: o.temporary, asking: o.plugins} {
		c, err := n.chainOf("sriov-beside-"+program, "node-sriov", pluginSet{sideOurs, folder})
		if err != nil {
			return err
		}
		c.plugins = []pluginConf{afterOthers(program, c.pod)}
		entries[program] = newEntry(program, lookupContender{c, plainPod + ";K8S_POD_UID=" + podUID})
		all = append(all, entries[program])
	}
	runRounds(all, 2*o.rounds) // more rounds, because the differences are small
	for _, e := range all {
		if e.err != nil {
			return fmt.Errorf("pod without VF, %s: %w", e.side, e.err)
		}
	}
	for _, verb := range []string{verbAdd, verbDel} {
		least := p50(entries[idle].samples[verb].chain)
		f := figure{Value: p50(entries[asking].samples[verb].chain) - least}
		what := fmt.Sprintf("pod without VF: sriov %s above the %.1f ms of a plugin that does nothing%s", verb, least, beside)
		r.addLoad(what, 0, map[string]figure{sideOurs: f})
	}
	return nil
}

// measureVF measures a pod with one VF, without VF settings and IPAM.
func (n nodes) measureVF(r *report, o options) error {
	c, err := n.chainOf("sriov-vf", "node-sriov", pluginSet{sideOurs, o.plugins})
	if err != nil {
		return err
	}
	c.plugins = []pluginConf{afterOthers("sriov", c.pod)}
	ours := newEntry(sideOurs, lookupContender{c, podWithVF})
	runRounds([]*contenderEntry{ours}, o.rounds)
	if ours.err != nil {
		return fmt.Errorf("pod with a VF: %w", ours.err)
	}
	for _, verb := range []string{verbAdd, verbCheck, verbDel} {
		r.addLoad("pod with one VF, sriov "+verb, 0, map[string]figure{sideOurs: {Value: p50(ours.samples[verb].chain)}})
	}
	return nil
}

// measureJournal measures what the journal costs an ADD if /run is a tmpfs. On a disk, two fsync calls come on top.
func measureJournal(r *report, o options) error {
	dir, err := store.Make(filepath.Join(store.Root, ".bench"), 0o700)
	if err != nil {
		return err
	}
	defer dir.Close()
	var samples []time.Duration
	for range o.rounds {
		start := time.Now()
		if err := dir.WriteSync("journal", make([]byte, 600), 0o600); err != nil {
			return err
		}
		samples = append(samples, time.Since(start))
	}
	f := figure{Value: p50(samples)}
	f.Note = fmt.Sprintf("%.2f", f.Value)
	r.Loads = append(r.Loads, figureRow{What: "of ADD with a VF, the journal, written and synced, /run in memory",
		Sides: map[string]figure{sideOurs: f}})
	return errors.Join(dir.Remove("journal"), os.Remove(dir.Path()))
}

// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// tryCase runs one case: act makes changes to a pod and cleans up as a runtime does. Then no state of this pod remains, the pod that stays
// attached in all cases is unchanged, and ADD and DEL of the container work again.
func (s *killSweep) tryCase(t *testing.T, title string, act func(pod *sandbox.Pod, rt *libcni.RuntimeConf) error) {
	t.Helper()
	s.Points++
	err := s.tryAct(act)
	if err == nil {
		s.Next++
		if err = s.attachAgain(); err != nil {
			s.NextFailed++
		}
	}
	if err == nil {
		_, err = s.Do("CHECK", harness.Attachment(s.stays, "stays", nil), nil)
	}
	if err != nil {
		t.Errorf("%s: %v", title, err)
	}
}

func (s *killSweep) tryAct(act func(pod *sandbox.Pod, rt *libcni.RuntimeConf) error) error {
	pod, err := sandbox.NewPod(victimID)
	if err != nil {
		return err
	}
	defer pod.Close()
	before, err := harness.NewOracle(s.stays)
	if err != nil {
		return err
	}
	if err := act(pod, harness.Attachment(pod, victimID, harness.Capabilities())); err != nil {
		return err
	}
	if err := pod.Close(); err != nil {
		return err
	}
	leaks, err := before.Leaks()
	if err == nil && len(leaks) > 0 {
		s.Leaks++
		err = fmt.Errorf("%d leaks: %q", len(leaks), leaks)
	}
	return err
}

func (s *killSweep) delWithoutNetns(rt *libcni.RuntimeConf) error {
	rt.NetNS = ""
	_, err := s.Do("DEL", rt, nil)
	return err
}

// doPaused runs a verb of the chain, and a shell command when it reaches a point.
func (s *killSweep) doPaused(verb string, at int, command string) (*faultExec, error) {
	e := &faultExec{at: at, run: command, dir: s.dir}
	n, err := harness.OpenNetwork(s.conflist, s.cacheDir, e)
	if err != nil {
		return nil, err
	}
	_, err = n.Do(verb, harness.Attachment(&sandbox.Pod{Path: "/run/netns/" + victimID}, victimID, harness.Capabilities()), nil)
	return e, err
}

// atEveryPoint runs the verb once for each point of faultExec, or for a sample, with a shell command at that point and a call of after.
// Both may fail, but every error must have a code.
func (s *killSweep) atEveryPoint(t *testing.T, verb, command string, after func(pod *sandbox.Pod, rt *libcni.RuntimeConf) error) {
	t.Helper()
	points, _ := s.measureVerb(t, verb)
	stride := harness.Some(points/4+1, 1)
	for at := 1; at <= points; at += stride {
		s.tryCase(t, fmt.Sprintf("%s at point %d", verb, at), func(pod *sandbox.Pod, rt *libcni.RuntimeConf) error {
			if verb == "DEL" {
				if _, err := s.Do("ADD", rt, nil); err != nil {
					return fmt.Errorf("ADD before: %w", err)
				}
			}
			e, err := s.doPaused(verb, at, command)
			if err := harness.Coded(err); err != nil {
				return err
			}
			if err := after(pod, rt); err != nil {
				return fmt.Errorf("%s: %w", e.where, err)
			}
			return nil
		})
	}
	s.Report(t)
}

func leaseFiles(network string) (list []string) {
	entries, _ := os.ReadDir("/var/lib/cni/networks/" + network)
	for _, e := range entries {
		if name := e.Name(); strings.ContainsAny(name, ".:") && strings.Trim(name, "0123456789abcdef.:") == "" && !strings.HasPrefix(name, ".") {
			list = append(list, name)
		}
	}
	return list
}

func sorted(list []string) []string { slices.Sort(list); return list }

// hostVethOf returns the host-side veth in a result.
func hostVethOf(t testing.TB, result types.Result) string {
	t.Helper()
	interfaces, _ := harness.RawObject(t, string(harness.Encode(result)))["interfaces"].([]any)
	for _, i := range interfaces {
		if i, _ := i.(map[string]any); i["sandbox"] == nil && strings.HasPrefix(fmt.Sprint(i["name"]), "veth") {
			return fmt.Sprint(i["name"])
		}
	}
	t.Fatalf("no host side in %s", harness.Encode(result))
	return ""
}

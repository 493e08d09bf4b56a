// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/sriov"
)

// problems checks the invariants of the node, and returns a text for each violated invariant.
func (m *nodeModel) problems() (list []string) {
	records, err := claim.List(m.options.Claims)
	if err != nil {
		return []string{err.Error()}
	}
	held, err := sriov.Holdings()
	if err != nil {
		return []string{err.Error()}
	}
	for _, vf := range []string{vf0, vf1, vf2, vf3} {
		var owners []string
		for _, r := range records {
			if r.Has(vf) {
				owners = append(owners, r.Claim().UID)
			}
		}
		if len(owners) > 1 {
			list = append(list, fmt.Sprintf("VF %s is of claims %q", vf, owners))
		}
		for _, h := range held {
			if h.Address.String() == vf && (len(owners) == 0 || owners[0] != h.Claim.UID) {
				list = append(list, fmt.Sprintf("VF %s is in pod %s by claim %s, and of claims %q", vf, h.Pod, h.Claim.UID, owners))
			}
		}
	}
	for _, p := range m.pods {
		if p.has {
			list = append(list, m.missingLinks(p)...)
		}
	}
	return list
}

// missingLinks returns the interfaces that are missing in a pod.
func (m *nodeModel) missingLinks(p *modelPod) (list []string) {
	netns, err := os.Open(p.Path)
	must(m.draLab, err)
	defer netns.Close()
	pod, err := kernel.Open(netns)
	must(m.draLab, err)
	defer pod.Close()
	for i, r := range m.claims[p.claim].Status.Allocation.Devices.Results {
		name := fmt.Sprint("net", i+1)
		link, ok, err := pod.Link(name)
		mtu := 1400 + int(r.Device[len(r.Device)-1]-'0')
		if err != nil || !ok || link.MTU != mtu {
			list = append(list, fmt.Sprintf("pod %s of %s lacks %s for %s: %v, mtu %d",
				p.name, m.claims[p.claim].Name, name, r.Device, err, link.MTU))
		}
	}
	return list
}

// TestModel runs random operations 1,000 times: claims are prepared and unprepared concurrently, pods start and end, the API server
// allocates one VF to several claims, and the daemon is killed at any moment. A VF never has two owners, and no pod loses its VF or
// starts without it. At the end, all VFs are on the node with their former settings.
func TestModel(t *testing.T) {
	m := newModel(t)
	rounds := 1000
	if testing.Short() {
		rounds = 50
	}
	var recent []string
	for n := range rounds {
		happened, problems := m.runRound(n)
		if recent = append(recent, happened); len(recent) > 6 {
			recent = recent[1:]
		}
		if len(problems) > 0 {
			t.Fatalf("%s\nafter\n%s", strings.Join(problems, "\n"), strings.Join(recent, ""))
		}
	}
	for _, p := range m.pods {
		must(t, m.del(p))
	}
	for _, c := range m.claims {
		must(t, m.unprepare(t.Context(), string(c.UID)))
	}
	if got := m.nodeLinks(); got != m.golden {
		t.Errorf("the VFs are home as\n%s\nand were\n%s", got, m.golden)
	}
	if left := m.fileNames(m.options.Claims) + m.fileNames(m.options.CDI); left != "" {
		t.Errorf("left: %s", left)
	}
	t.Logf("%v", m.count)
	for _, name := range []string{"prepare", "unprepare", "ADD", "DEL", "crash"} {
		if m.count[name] < rounds/20 {
			t.Errorf("%d times %s in %d rounds", m.count[name], name, rounds)
		}
	}
}

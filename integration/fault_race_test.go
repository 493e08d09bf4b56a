// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/podlace/podlace/pkg/sandbox"
)

// TestFaultRace: many at once, and one after another without a pause.
func TestFaultRace(t *testing.T) {
	t.Run("F-12 parallel ADDs, then parallel DELs", testParallel)
	t.Run("F-14 the first ADDs of a node race", func(t *testing.T) { testFirstRace(t, "nftables", some(8, 100)) })
	t.Run("F-14 the first ADDs of a node race, iptables", func(t *testing.T) { testFirstRace(t, "iptables", some(8, 100)) })
	t.Run("F-18 ADD straight after DEL", testTightLoop)
	t.Run("F-18 the name of the host side is taken", testNameTaken)
	t.Run("F-42 other programs churn links", testChurn)
}

// crowd attaches n pods at once, looks whether their addresses differ, and detaches them at once.
func (s *sweep) crowd(t *testing.T, n int) {
	t.Helper()
	pods, results := make([]*sandbox.Pod, n), make([]object, n)
	for i := range pods {
		pods[i] = newPod(t, fmt.Sprintf("crowd-%d", i))
		defer pods[i].Close()
	}
	each := func(verb string) {
		var wait sync.WaitGroup
		for i, pod := range pods {
			wait.Go(func() {
				caps := capabilities()
				caps["portMappings"] = []any{object{"hostPort": 10000 + i, "containerPort": 80, "protocol": "tcp"}}
				result, err := s.do(verb, attachment(pod, pod.Name, caps), nil)
				if err != nil {
					t.Errorf("%s of %s: %v", verb, pod.Name, err)
				} else if verb == "ADD" {
					results[i] = rawObject(t, string(encode(result)))
				}
			})
		}
		wait.Wait()
	}
	each("ADD")
	s.points += n
	owner := map[string]int{}
	for i, r := range results {
		for _, address := range addresses(t, r) {
			if other, taken := owner[address]; taken {
				s.duplicates++
				t.Errorf("%s was given to %d and to %d", address, other, i)
			}
			owner[address] = i
		}
	}
	if len(owner) != 2*n {
		t.Errorf("%d addresses for %d pods", len(owner), n)
	}
	each("DEL")
}

func testParallel(t *testing.T) {
	s := newSweep(t, "nftables")
	s.crowd(t, 2)
	before := watch(t, s.stays)
	s.crowd(t, some(24, 200))
	before.clean(t, "parallel ADDs and DELs")
	s.report(t)
}

// testFirstRace: the bridge, the tables, and the folders are missing, and many want to make them.
func testFirstRace(t *testing.T, backend string, pods int) {
	program(t, "nft")
	if backend == "iptables" {
		program(t, "iptables-restore")
	}
	s := newSweep(t, backend)
	s.must(t, "DEL", attachment(s.stays, "stays", nil))
	for range some(2, 100) {
		shell(t, "ip link del chain0; nft flush ruleset; rm -rf /run/podlace /var/lib/cni/networks")
		s.crowd(t, pods)
		if left := leaseFiles("chain"); len(left) > 0 {
			s.leaks++
			t.Errorf("leases are left: %q", left)
		}
	}
	s.report(t)
}

// testTightLoop: the kernel dismantles namespaces in the background, and names are the same each time.
func testTightLoop(t *testing.T) {
	s := newSweep(t, "nftables")
	before := watch(t, s.stays)
	for i := range some(20, 1000) {
		s.points++
		pod, err := sandbox.NewPod(victim)
		if err != nil {
			t.Fatal(err)
		}
		rt := attachment(pod, victim, capabilities())
		s.must(t, "ADD", rt)
		if i%2 == 0 {
			s.must(t, "DEL", rt)
			s.must(t, "ADD", rt)
		}
		if err := pod.Close(); err != nil {
			t.Fatal(err)
		}
		if rt.NetNS = ""; i%3 != 0 {
			s.must(t, "DEL", rt)
			continue
		}
		if pod, err = sandbox.NewPod(victim); err != nil { // no DEL at all: the pod was thrown away and comes again
			t.Fatal(err)
		}
		if err := s.untilGone(t, attachment(pod, victim, capabilities())); err != nil {
			t.Fatal(err)
		}
		s.must(t, "DEL", attachment(pod, victim, nil))
		if err := pod.Close(); err != nil {
			t.Fatal(err)
		}
	}
	before.clean(t, "a tight loop")
	s.report(t)
}

// untilGone runs ADD for a container whose last namespace was removed without a DEL. It is refused for as long as the kernel has the link.
func (s *sweep) untilGone(t *testing.T, rt *libcni.RuntimeConf) error {
	t.Helper()
	for range 1000 {
		_, err := s.do("ADD", rt, nil)
		if err == nil || !strings.Contains(err.Error(), "in another namespace") {
			return err
		}
	}
	return errors.New("the link of a namespace that is gone does not go")
}

// testNameTaken: somebody has a link with the name that the host side wants.
func testNameTaken(t *testing.T) {
	s := newSweep(t, "nftables")
	pod := newPod(t, "taken")
	rt := attachment(pod, "taken", nil)
	result, err := s.do("ADD", rt, nil)
	if err != nil {
		t.Fatal(err)
	}
	host := hostSide(t, result)
	s.must(t, "DEL", rt)
	before := watch(t, pod)
	shell(t, "ip link add "+host+" type veth peer name other0")
	s.points++
	if _, err := s.do("ADD", rt, nil); err == nil || coded(err) != nil {
		t.Errorf("ADD over the link of somebody else: %v", err)
	}
	shell(t, "ip link del "+host)
	before.clean(t, "ADD that was refused")
	s.must(t, "ADD", rt)
	s.must(t, "CHECK", rt)
	s.must(t, "DEL", rt)
	s.next++
	before.clean(t, "the next ADD and DEL")
	s.report(t)
}

// testChurn: every dump of links is interrupted by changes of others.
func testChurn(t *testing.T) {
	s := newSweep(t, "nftables")
	stop := make(chan struct{})
	var wait sync.WaitGroup
	for i := range 8 {
		wait.Go(func() {
			name := fmt.Sprintf("churn%d", i)
			for {
				select {
				case <-stop:
					return
				default:
				}
				// Only what works is repeated: neither result matters.
				_ = exec.Command("ip", "link", "add", name, "type", "veth", "peer", "name", name+"p").Run()
				_ = exec.Command("ip", "link", "del", name).Run()
			}
		})
	}
	pod := newPod(t, victim)
	rt := attachment(pod, victim, capabilities())
	for range some(8, 1000) {
		s.points++
		for _, verb := range []string{"ADD", "CHECK", "DEL"} {
			if _, err := s.do(verb, rt, nil); err != nil {
				t.Errorf("%s: %v", verb, err)
			}
		}
	}
	close(stop)
	wait.Wait()
	if left := leaseFiles("chain"); len(left) != 2 {
		s.leaks++
		t.Errorf("leases %q, want those of one pod", left)
	}
	s.report(t)
}

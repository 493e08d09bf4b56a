// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/plugin"
)

// TestFaultRace runs verbs in parallel, and one after another without a pause.
func TestFaultRace(t *testing.T) {
	t.Run("F-12 parallel ADDs, then parallel DELs", testParallel)
	t.Run("F-14 the first ADDs of a node race", func(t *testing.T) { testFirstRace(t, "nftables", harness.Some(8, 100)) })
	t.Run("F-14 the first ADDs of a node race, iptables", func(t *testing.T) { testFirstRace(t, "iptables", harness.Some(8, 100)) })
	t.Run("F-18 ADD straight after DEL", testTightLoop)
	t.Run("F-18 the name of the host side is taken", testNameTaken)
	t.Run("F-42 other programs churn links", testChurn)
}

// attachCrowd attaches and detaches n pods in parallel, and checks that their addresses differ.
func (s *killSweep) attachCrowd(t *testing.T, n int) {
	t.Helper()
	pods, results := make([]*sandbox.Pod, n), make([]object, n)
	for i := range pods {
		pods[i] = harness.NewPod(t, fmt.Sprintf("crowd-%d", i))
		defer pods[i].Close()
	}
	each := func(verb string) {
		var wait sync.WaitGroup
		for i, pod := range pods {
			wait.Go(func() {
				caps := harness.Capabilities()
				caps["portMappings"] = []any{object{"hostPort": 10000 + i, "containerPort": 80, "protocol": "tcp"}}
				rt := harness.Attachment(pod, pod.Name, caps)
				result, err := s.Do(verb, rt, nil)
				for tries := 0; isLockTimeout(err) && tries < 20; tries++ { // runtimes retry as well on a slow machine
					t.Logf("again: %v", err)
					s.Must(t, "DEL", rt)
					result, err = s.Do(verb, rt, nil)
				}
				if err != nil {
					t.Errorf("%s of %s: %v", verb, pod.Name, err)
				} else if verb == "ADD" {
					results[i] = harness.RawObject(t, string(harness.Encode(result)))
				}
			})
		}
		wait.Wait()
	}
	each("ADD")
	s.Points += n
	owner := map[string]int{}
	for i, r := range results {
		for _, address := range harness.Addresses(t, r) {
			if other, taken := owner[address]; taken {
				s.Duplicates++
				t.Errorf("%s was assigned to %d and to %d", address, other, i)
			}
			owner[address] = i
		}
	}
	if len(owner) != 2*n {
		t.Errorf("%d addresses for %d pods", len(owner), n)
	}
	each("DEL")
}

func isLockTimeout(err error) bool {
	var doc *types.Error
	return errors.As(err, &doc) && doc.Code == plugin.CodeTryAgain
}

func testParallel(t *testing.T) {
	s := newSweep(t, "nftables")
	s.attachCrowd(t, 2)
	before := harness.Watch(t, s.stays)
	s.attachCrowd(t, harness.Some(16, 200))
	before.Clean(t, "parallel ADDs and DELs")
	s.Report(t)
}

// testFirstRace runs parallel ADDs on a node without Podlace's bridge, tables and folders.
func testFirstRace(t *testing.T, backend string, pods int) {
	harness.Program(t, "nft")
	if backend == "iptables" {
		harness.Program(t, "iptables-restore")
	}
	s := newSweep(t, backend)
	s.Must(t, "DEL", harness.Attachment(s.stays, "stays", nil))
	for range harness.Some(1, 100) {
		harness.Shell(t, "ip link del chain0; nft flush ruleset; rm -rf /run/podlace /var/lib/cni/networks")
		s.attachCrowd(t, pods)
		if left := leaseFiles("chain"); len(left) > 0 {
			s.Leaks++
			t.Errorf("leases are left: %q", left)
		}
	}
	s.Report(t)
}

// testTightLoop repeats ADD and DEL of one container. Each ADD uses the same link names, although the kernel may still be removing the
// namespace before.
func testTightLoop(t *testing.T) {
	s := newSweep(t, "nftables")
	before := harness.Watch(t, s.stays)
	for i := range harness.Some(10, 1000) {
		s.Points++
		pod, err := sandbox.NewPod(victimID)
		if err != nil {
			t.Fatal(err)
		}
		rt := harness.Attachment(pod, victimID, harness.Capabilities())
		s.Must(t, "ADD", rt)
		if i%2 == 0 {
			s.Must(t, "DEL", rt)
			s.Must(t, "ADD", rt)
		}
		if err := pod.Close(); err != nil {
			t.Fatal(err)
		}
		if rt.NetNS = ""; i%3 != 0 {
			s.Must(t, "DEL", rt)
			continue
		}
		if pod, err = sandbox.NewPod(victimID); err != nil { // without DEL: the pod is lost and its container ID is used again
			t.Fatal(err)
		}
		if err := s.retryADD(t, harness.Attachment(pod, victimID, harness.Capabilities())); err != nil {
			t.Fatal(err)
		}
		s.Must(t, "DEL", harness.Attachment(pod, victimID, nil))
		if err := pod.Close(); err != nil {
			t.Fatal(err)
		}
	}
	before.Clean(t, "a tight loop")
	s.Report(t)
}

// retryADD retries ADD for a container whose namespace ended without a DEL. It fails until the kernel has removed the old link.
func (s *killSweep) retryADD(t *testing.T, rt *libcni.RuntimeConf) error {
	t.Helper()
	for range 1000 {
		_, err := s.Do("ADD", rt, nil)
		if err == nil || !strings.Contains(err.Error(), "in another namespace") {
			return err
		}
	}
	return errors.New("the kernel does not remove the link of a deleted namespace")
}

func testNameTaken(t *testing.T) {
	s := newSweep(t, "nftables")
	pod := harness.NewPod(t, "taken")
	rt := harness.Attachment(pod, "taken", nil)
	result, err := s.Do("ADD", rt, nil)
	if err != nil {
		t.Fatal(err)
	}
	host := hostVethOf(t, result)
	s.Must(t, "DEL", rt)
	before := harness.Watch(t, pod)
	harness.Shell(t, "ip link add "+host+" type veth peer name other0")
	s.Points++
	if _, err := s.Do("ADD", rt, nil); err == nil || harness.Coded(err) != nil {
		t.Errorf("ADD over a foreign link: %v", err)
	}
	harness.Shell(t, "ip link del "+host)
	before.Clean(t, "ADD that was refused")
	s.Must(t, "ADD", rt)
	s.Must(t, "CHECK", rt)
	s.Must(t, "DEL", rt)
	s.Next++
	before.Clean(t, "the next ADD and DEL")
	s.Report(t)
}

// testChurn runs verbs while other programs create and delete links, which makes the kernel mark dumps of links as interrupted.
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
				// Errors do not matter here; only changes of links do.
				_ = exec.Command("ip", "link", "add", name, "type", "veth", "peer", "name", name+"p").Run()
				_ = exec.Command("ip", "link", "del", name).Run()
			}
		})
	}
	pod := harness.NewPod(t, victimID)
	rt := harness.Attachment(pod, victimID, harness.Capabilities())
	for range harness.Some(4, 1000) {
		s.Points++
		for _, verb := range []string{"ADD", "CHECK", "DEL"} {
			if _, err := s.Do(verb, rt, nil); err != nil {
				t.Errorf("%s: %v", verb, err)
			}
		}
	}
	close(stop)
	wait.Wait()
	if left := leaseFiles("chain"); len(left) != 2 {
		s.Leaks++
		t.Errorf("leases %q, want those of one pod", left)
	}
	s.Report(t)
}

// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// bootID is the file by which plugins tell boots apart.
const bootID = "/proc/sys/kernel/random/boot_id"

// rebootNode emulates a reboot: it removes the kernel's state and /run, keeps the leases, and mounts a new boot ID over the kernel's file.
func rebootNode(t *testing.T, pods ...*sandbox.Pod) {
	t.Helper()
	harness.Program(t, "nft")
	for _, pod := range pods {
		if err := pod.Close(); err != nil {
			t.Fatal(err)
		}
	}
	harness.Shell(t, "nft flush ruleset; rm -rf /run/podlace; "+
		"echo 0 >/proc/sys/net/ipv4/ip_forward; echo 0 >/proc/sys/net/ipv6/conf/all/forwarding; "+
		"for l in $(for kind in veth ifb bridge; do ip -o link show type $kind; done | sed 's/^[0-9]*: //; s/[@:].*//'); do ip link del $l 2>/dev/null || true; done")
	file := filepath.Join(t.TempDir(), "boot_id")
	id := fmt.Sprintf("%08x-0000-4000-8000-000000000000\n", time.Now().UnixNano()&0xffffffff)
	longAgo := time.Now().AddDate(-10, 0, 0) // the machine has really been booted later
	if err := errors.Join(os.WriteFile(file, []byte(id), 0o444), unix.Mount(file, bootID, "", unix.MS_BIND, ""),
		setTimes("/var/lib/cni/networks", longAgo)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(bootID, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

func TestFaultBoot(t *testing.T) {
	t.Run("F-27 reboot with pods", testReboot)
	t.Run("F-27 leases of an earlier boot are given again, those of this one never", testRebootFull)
	for _, verb := range []string{"ADD", "DEL"} {
		t.Run("F-28 reboot in the middle of "+verb, func(t *testing.T) { testRebootMidway(t, verb) })
	}
	t.Run("F-29 clocks jump", testClocks)
}

// testReboot: after a reboot, the runtime sends DEL with an empty netns for one of two pods and none for the other. New pods get other
// addresses.
func testReboot(t *testing.T) {
	s := newSweep(t, "nftables")
	s.Points++
	gone, forgotten := harness.NewPod(t, "gone"), harness.NewPod(t, "forgotten")
	s.Must(t, "ADD", harness.Attachment(gone, "gone", harness.Capabilities()))
	s.Must(t, "ADD", harness.Attachment(forgotten, "forgotten", nil))
	before := leaseFiles("chain")
	rebootNode(t, gone, forgotten, s.stays)
	pod := harness.NewPod(t, "new")
	rt := harness.Attachment(pod, "new", harness.Capabilities())
	for _, address := range harness.Addresses(t, s.Must(t, "ADD", rt)) {
		for _, old := range before {
			if old == address {
				s.Duplicates++
				t.Errorf("%s is assigned again immediately", address)
			}
		}
	}
	s.Next++
	s.Must(t, "CHECK", rt)
	for range 2 {
		s.Must(t, "DEL", harness.Attachment(&sandbox.Pod{}, "gone", harness.Capabilities()))
	}
	s.Must(t, "CHECK", rt)
	bare, err := harness.OpenNetwork(s.conflist, t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	s.Must(t, "DEL", rt)
	bare.Must(t, "GC", nil)
	if left := leaseFiles("chain"); len(left) > 0 {
		s.Leaks++
		t.Errorf("leases %q are left", left)
	}
	s.Report(t)
}

// testRebootFull: a reboot frees a pool full of leases of pods for which the runtime never calls DEL.
func testRebootFull(t *testing.T) {
	conf := modelConf().With("name", "full", "bridge", "full0")
	y := harness.Tally{}
	add := func(id string) (string, *sandbox.Pod) {
		pod := harness.NewPod(t, id)
		return harness.Addresses(t, harness.RawObject(t, harness.NewCall("ADD", "bridge", pod, id, conf).Run(t).OK(t).Stdout))[0], pod
	}
	var pods []*sandbox.Pod
	for i := range 5 {
		_, pod := add(fmt.Sprintf("old-%d", i))
		pods = append(pods, pod)
	}
	rebootNode(t, pods...)
	live := map[string]string{}
	for i := range 5 {
		id := fmt.Sprintf("new-%d", i)
		address, _ := add(id)
		y.Points++
		if other, taken := live[address]; taken {
			y.Duplicates++
			t.Errorf("%s of %s was given to %s", address, other, id)
		}
		live[address] = id
	}
	pod := harness.NewPod(t, "one-more")
	harness.NewCall("ADD", "bridge", pod, "one-more", conf).Run(t).Refused(t, harness.CodeExhausted)
	for i := range 5 {
		harness.NewCall("DEL", "bridge", nil, fmt.Sprintf("old-%d", i), conf).Run(t).OK(t)
		harness.NewCall("DEL", "bridge", nil, fmt.Sprintf("new-%d", i), conf).Run(t).OK(t)
		y.Next++
	}
	if left := leaseFiles("full"); len(left) > 0 {
		y.Leaks++
		t.Errorf("leases %q are left", left)
	}
	y.Report(t)
}

// testRebootMidway reboots while a verb runs, as a power failure does. DEL after the reboot leaves no state of the pod.
func testRebootMidway(t *testing.T, verb string) {
	s := newSweep(t, "nftables")
	points, _ := s.measureVerb(t, verb)
	s.Must(t, "DEL", harness.Attachment(s.stays, "stays", nil))
	for at := 1; at <= points; at += harness.Some(points/4+1, 1) {
		s.Points++
		pod, err := sandbox.NewPod(victimID)
		if err != nil {
			t.Fatal(err)
		}
		if verb == "DEL" {
			s.Must(t, "ADD", harness.Attachment(pod, victimID, harness.Capabilities()))
		}
		e, err := s.runKilled(killCase{verb: verb, at: at, policy: "all"})
		if err != nil {
			t.Fatal(err)
		}
		t.Run(fmt.Sprint(at), func(t *testing.T) { // the subtest ends the simulated boot
			rebootNode(t, pod)
			if err := s.delWithoutNetns(harness.Attachment(pod, victimID, harness.Capabilities())); err != nil {
				t.Errorf("DEL after the boot: %v", err)
			}
			if left := leaseFiles("chain"); len(left) > 0 {
				s.Leaks++
				t.Errorf("%s: leases %q remain", e.where, left)
			}
			s.Next++
			if err := s.attachAgain(); err != nil {
				s.NextFailed++
				t.Errorf("%s: %v", e.where, err)
			}
		})
	}
	s.Report(t)
}

// testClocks emulates a large change of a clock between ADD and DEL. For the wall clock, it changes the modification times of state files.
func testClocks(t *testing.T) {
	unshare := harness.Program(t, "unshare")
	s := newSweep(t, "nftables")
	const decade = 10 * 365 * 24 * 3600
	later := []string{unshare, "--time", "--boottime", fmt.Sprint(decade), "--monotonic", fmt.Sprint(decade), "--fork"}
	s.tryCase(t, "time namespace", func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
		if err := s.doWrapped("ADD", harness.ChainPlugins()[0], rt, later...); err != nil {
			return err
		}
		_, err := s.Do("CHECK", rt, nil)
		return errors.Join(err, s.doWrapped("DEL", harness.ChainPlugins()[0], rt, later...))
	})
	for title, jump := range harness.InOrder(map[string]time.Duration{"ten years back": -decade * time.Second,
		"ten years ahead": decade * time.Second}) {
		s.tryCase(t, "files "+title, func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
			if _, err := s.Do("ADD", rt, nil); err != nil {
				return err
			}
			err := errors.Join(setTimes("/run/podlace", time.Now().Add(jump)), setTimes("/var/lib/cni/networks", time.Now().Add(jump)))
			_, check := s.Do("CHECK", rt, nil)
			_, del := s.Do("DEL", rt, nil)
			return errors.Join(err, check, del)
		})
	}
	s.Report(t)
}

// setTimes sets the modification times below a folder.
func setTimes(dir string, when time.Time) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || strings.HasPrefix(entry.Name(), ".tmp-") {
			return err
		}
		return os.Chtimes(path, when, when)
	})
}

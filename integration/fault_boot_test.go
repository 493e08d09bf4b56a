// SPDX-License-Identifier: Apache-2.0

package integration

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

	"github.com/podlace/podlace/pkg/sandbox"
)

// bootID is how a plugin tells boots apart.
const bootID = "/proc/sys/kernel/random/boot_id"

// reboot takes away what does not survive one: the kernel's state and /run. Leases stay. Another boot ID is mounted over the kernel's.
func reboot(t *testing.T, pods ...*sandbox.Pod) {
	t.Helper()
	program(t, "nft")
	for _, pod := range pods {
		if err := pod.Close(); err != nil {
			t.Fatal(err)
		}
	}
	shell(t, "nft flush ruleset; rm -rf /run/podlace; "+
		"echo 0 >/proc/sys/net/ipv4/ip_forward; echo 0 >/proc/sys/net/ipv6/conf/all/forwarding; "+
		"for l in $(for kind in veth ifb bridge; do ip -o link show type $kind; done | sed 's/^[0-9]*: //; s/[@:].*//'); do ip link del $l 2>/dev/null || true; done")
	file := filepath.Join(t.TempDir(), "boot_id")
	id := fmt.Sprintf("%08x-0000-4000-8000-000000000000\n", time.Now().UnixNano()&0xffffffff)
	if err := errors.Join(os.WriteFile(file, []byte(id), 0o444), unix.Mount(file, bootID, "", unix.MS_BIND, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(bootID, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// TestFaultBoot: the node goes down, or its clock jumps.
func TestFaultBoot(t *testing.T) {
	t.Run("F-27 reboot with pods", testReboot)
	t.Run("F-27 leases of an earlier boot are given again, those of this one never", testRebootFull)
	for _, verb := range []string{"ADD", "DEL"} {
		t.Run("F-28 reboot in the middle of "+verb, func(t *testing.T) { testRebootMidway(t, verb) })
	}
	t.Run("F-29 clocks jump", testClocks)
}

// testReboot: after the boot, DEL comes with an empty netns, or never, and new pods come up with other addresses.
func testReboot(t *testing.T) {
	s := newSweep(t, "nftables")
	s.points++
	gone, forgotten := newPod(t, "gone"), newPod(t, "forgotten")
	s.must(t, "ADD", attachment(gone, "gone", capabilities()))
	s.must(t, "ADD", attachment(forgotten, "forgotten", nil))
	before := leaseFiles("chain")
	reboot(t, gone, forgotten, s.stays)
	pod := newPod(t, "new")
	rt := attachment(pod, "new", capabilities())
	for _, address := range addresses(t, s.must(t, "ADD", rt)) {
		for _, old := range before {
			if old == address {
				s.duplicates++
				t.Errorf("%s is given again at once", address)
			}
		}
	}
	s.next++
	s.must(t, "CHECK", rt)
	for range 2 {
		s.must(t, "DEL", attachment(&sandbox.Pod{}, "gone", capabilities()))
	}
	s.must(t, "CHECK", rt)
	bare, err := openNetwork(s.conflist, t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	s.must(t, "DEL", rt)
	bare.must(t, "GC", nil)
	if left := leaseFiles("chain"); len(left) > 0 {
		s.leaks++
		t.Errorf("leases %q are left", left)
	}
	s.report(t)
}

// testRebootFull: a pool is full of leases whose DEL never comes.
func testRebootFull(t *testing.T) {
	conf := modelConf().with("name", "full", "bridge", "full0")
	y := tally{}
	add := func(id string) (string, *sandbox.Pod) {
		pod := newPod(t, id)
		return addresses(t, rawObject(t, newCall("ADD", "bridge", pod, id, conf).run(t).ok(t).stdout))[0], pod
	}
	var pods []*sandbox.Pod
	for i := range 5 {
		_, pod := add(fmt.Sprintf("old-%d", i))
		pods = append(pods, pod)
	}
	reboot(t, pods...)
	live := map[string]string{}
	for i := range 5 {
		id := fmt.Sprintf("new-%d", i)
		address, _ := add(id)
		y.points++
		if other, taken := live[address]; taken {
			y.duplicates++
			t.Errorf("%s of %s was given to %s", address, other, id)
		}
		live[address] = id
	}
	pod := newPod(t, "one-more")
	newCall("ADD", "bridge", pod, "one-more", conf).run(t).refused(t, codeExhausted)
	for i := range 5 {
		newCall("DEL", "bridge", nil, fmt.Sprintf("old-%d", i), conf).run(t).ok(t)
		newCall("DEL", "bridge", nil, fmt.Sprintf("new-%d", i), conf).run(t).ok(t)
		y.next++
	}
	if left := leaseFiles("full"); len(left) > 0 {
		y.leaks++
		t.Errorf("leases %q are left", left)
	}
	y.report(t)
}

// testRebootMidway: the power fails at a point of a verb; after the boot nothing is left but what the runtime deletes.
func testRebootMidway(t *testing.T, verb string) {
	s := newSweep(t, "nftables")
	points, _ := s.measure(t, verb)
	s.must(t, "DEL", attachment(s.stays, "stays", nil))
	for at := 1; at <= points; at += some(points/6+1, 1) {
		s.points++
		pod, err := sandbox.NewPod(victim)
		if err != nil {
			t.Fatal(err)
		}
		if verb == "DEL" {
			s.must(t, "ADD", attachment(pod, victim, capabilities()))
		}
		e, err := s.killed(kill{verb: verb, at: at, policy: "all"})
		if err != nil {
			t.Fatal(err)
		}
		t.Run(fmt.Sprint(at), func(t *testing.T) { // which ends the boot
			reboot(t, pod)
			if err := s.emptied(attachment(pod, victim, capabilities())); err != nil {
				t.Errorf("DEL after the boot: %v", err)
			}
			if left := leaseFiles("chain"); len(left) > 0 {
				s.leaks++
				t.Errorf("%s: leases %q are left", e.where, left)
			}
			s.next++
			if err := s.again(); err != nil {
				s.nextFailed++
				t.Errorf("%s: %v", e.where, err)
			}
		})
	}
	s.report(t)
}

// testClocks: a pod is made in one time and deleted in another. Files tell wall-clock times, which jump too.
func testClocks(t *testing.T) {
	unshare := program(t, "unshare")
	s := newSweep(t, "nftables")
	const decade = 10 * 365 * 24 * 3600
	later := []string{unshare, "--time", "--boottime", fmt.Sprint(decade), "--monotonic", fmt.Sprint(decade), "--fork"}
	s.try(t, "time namespace", func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
		if err := s.wrapped("ADD", "bridge", rt, later...); err != nil {
			return err
		}
		_, err := s.do("CHECK", rt, nil)
		return errors.Join(err, s.wrapped("DEL", "bridge", rt, later...))
	})
	for title, jump := range inOrder(map[string]time.Duration{"ten years back": -decade * time.Second, "ten years ahead": decade * time.Second}) {
		s.try(t, "files "+title, func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
			if _, err := s.do("ADD", rt, nil); err != nil {
				return err
			}
			err := errors.Join(touch("/run/podlace", time.Now().Add(jump)), touch("/var/lib/cni/networks/.podlace", time.Now().Add(jump)))
			_, check := s.do("CHECK", rt, nil)
			_, del := s.do("DEL", rt, nil)
			return errors.Join(err, check, del)
		})
	}
	s.report(t)
}

// touch gives everything below a folder another time.
func touch(dir string, when time.Time) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || strings.HasPrefix(entry.Name(), ".tmp-") {
			return err
		}
		return os.Chtimes(path, when, when)
	})
}

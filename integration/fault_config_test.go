// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/podlace/podlace/pkg/kernel/kerneltest"
	"github.com/podlace/podlace/pkg/sandbox"
)

// TestFaultConfig: the configuration changes between ADD and DEL.
func TestFaultConfig(t *testing.T) {
	t.Run("F-41 DEL again and after edits", testDelAfterEdit)
	t.Run("F-47 address pool exhausted", testExhausted)
	t.Run("F-48 range shrunk or moved beneath live leases", testRangeMoved)
}

func testDelAfterEdit(t *testing.T) {
	s := newSweep(t, "nftables")
	first := func(o object) object { return object(o["plugins"].([]any)[0].(map[string]any)) }
	for title, edit := range inOrder(map[string]func(list object){
		"not at all":     func(object) {},
		"another subnet": func(o object) { first(o)["ipam"] = object{"type": "host-local", "subnet": "10.250.0.0/24"} },
		"another bridge": func(o object) { first(o)["bridge"] = "other0" },
		"other backends": func(o object) {
			first(o)["ipMasqBackend"] = "iptables"
			for _, p := range o["plugins"].([]any)[1:] {
				p.(map[string]any)["backend"] = "iptables"
			}
		},
		"no masquerade":         func(o object) { delete(first(o), "ipMasq") },
		"no IPAM":               func(o object) { delete(first(o), "ipam") },
		"another IPAM plugin":   func(o object) { first(o)["ipam"] = object{"type": "nobody"} },
		"another data folder":   func(o object) { first(o)["ipam"].(map[string]any)["dataDir"] = "/var/lib/elsewhere" },
		"values that are wrong": func(o object) { first(o)["mtu"], first(o)["vlan"] = -5, 70000 },
		"another version":       func(o object) { o["cniVersion"] = "0.4.0" },
		"bridge alone":          func(o object) { o["plugins"] = o["plugins"].([]any)[:1] },
	}) {
		s.try(t, title, func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
			if _, err := s.do("ADD", rt, nil); err != nil {
				return err
			}
			list := rawObject(t, string(s.conflist))
			edit(list)
			n, err := openNetwork(encode(list), t.TempDir(), nil)
			if err != nil {
				return err
			}
			var errs []error
			for i := range 3 {
				if i > 0 && title == "another IPAM plugin" {
					break // the record is gone, and nobody else knows what that plugin would have to give back
				}
				_, err := n.do("DEL", rt, nil)
				errs = append(errs, err)
			}
			if title == "bridge alone" { // the runtime does not know of portmap any more, and calls GC one day
				errs = append(errs, s.follow(kill{then: thenCollect, at: 1}, nil, rt))
			}
			return errors.Join(errs...)
		})
	}
	s.report(t)
}

// testExhausted: the error says how many addresses there are; STATUS keeps the node in service; the first DEL makes room.
func testExhausted(t *testing.T) {
	conf := modelConf().with("name", "full")
	y := tally{points: 1}
	pods := map[string]*sandbox.Pod{"one-more": newPod(t, "one-more")}
	call := func(verb, id string) call { return newCall(verb, "bridge", pods[id], id, conf) }
	for i := range 5 {
		id := fmt.Sprintf("full-%d", i)
		pods[id] = newPod(t, id)
		call("ADD", id).run(t).ok(t)
	}
	before := watch(t)
	failure := call("ADD", "one-more").run(t).refused(t, codeExhausted)
	if text := failure.Msg + failure.Details; !strings.Contains(text, "5 of 5") {
		t.Errorf("the error does not say how many are leased: %s", text)
	}
	before.clean(t, "the ADD that found no address")
	call("STATUS", "any").run(t).ok(t)
	call("DEL", "full-2").run(t).ok(t)
	call("STATUS", "any").run(t).ok(t)
	if marks, err := filepath.Glob("/run/podlace/.exhausted-*"); err != nil || len(marks) > 0 {
		t.Errorf("%v of a pool with room are left, %v", marks, err)
	}
	call("ADD", "one-more").run(t).ok(t)
	y.next++
	for _, id := range []string{"full-0", "full-1", "full-3", "full-4", "one-more"} {
		call("DEL", id).run(t).ok(t)
	}
	if left := leaseFiles("full"); len(left) > 0 {
		y.leaks++
		t.Errorf("leases %q are left", left)
	}
	y.report(t)
}

// testRangeMoved: pods of the old range keep their addresses, which no pod of the new range gets.
func testRangeMoved(t *testing.T) {
	s := newSweep(t, "nftables")
	ranged := func(from, to string) object {
		return modelConf().with("name", "moved", "bridge", "moved0", "ipam.ranges",
			[]any{[]any{map[string]any{"subnet": "10.78.0.0/24", "rangeStart": from, "rangeEnd": to}}})
	}
	wide := ranged("10.78.0.10", "10.78.0.20")
	seen := map[string]string{}
	add := func(id string, conf object) {
		s.points++
		address := addresses(t, rawObject(t, newCall("ADD", "bridge", newPod(t, id), id, conf).run(t).ok(t).stdout))[0]
		if other, taken := seen[address]; taken {
			s.duplicates++
			t.Errorf("%s of %s was given to %s", address, other, id)
		}
		seen[address] = id
	}
	for i := range 4 {
		add(fmt.Sprintf("wide-%d", i), wide)
	}
	for i, conf := range []object{ranged("10.78.0.12", "10.78.0.16"), ranged("10.78.0.30", "10.78.0.33"), ranged("10.78.0.9", "10.78.0.15"), wide} {
		add(fmt.Sprintf("moved-%d", i), conf)
	}
	if got := len(leaseFiles("moved")); got != len(seen) {
		t.Errorf("%d leases for %d pods", got, len(seen))
	}
	for address, id := range seen {
		if err := ping(nil, address, trafficLimit); err != nil {
			t.Errorf("%s of %s: %v", address, id, err)
		}
		newCall("DEL", "bridge", nil, id, ranged("10.78.0.100", "10.78.0.101")).run(t).ok(t)
	}
	if left := leaseFiles("moved"); len(left) > 0 {
		s.leaks++
		t.Errorf("leases %q are left", left)
	}
	s.report(t)
}

// TestFaultRecords: a record is what DEL works from.
func TestFaultRecords(t *testing.T) {
	t.Run("F-05 records cut, changed, replaced", testDamagedRecords)
	t.Run("F-07 lock file of the network removed", testLockFileRemoved)
	t.Run("F-08 lock of the attachment held by a process that stands still", testLockHeld)
}

// damages are what may happen to a small file.
func damages(random *rand.Rand, data []byte) []byte {
	data = bytes.Clone(data)
	switch random.IntN(6) {
	case 0:
		return nil
	case 1:
		return data[:random.IntN(len(data))]
	case 2:
		for range 1 + random.IntN(8) {
			data[random.IntN(len(data))] ^= 1 << random.IntN(8)
		}
	case 3:
		return make([]byte, random.IntN(5000))
	case 4:
		return bytes.Replace(data, []byte(`"format":1`), []byte(`"format":`+strconv.Itoa(random.IntN(1000))), 1)
	case 5:
		at := random.IntN(len(data))
		return slices.Concat(data[:at], data)
	}
	return data
}

// testDamagedRecords: DEL and GC of the pod whose records are damaged answer decently, DEL with the cached result leaves no link and no
// address, and no other pod is concerned.
func testDamagedRecords(t *testing.T) {
	s := newSweep(t, "nftables")
	random := kerneltest.Random(t)
	pod := newPod(t, victim)
	other := newPod(t, "other")
	for i := range some(15, 1000) {
		s.points++
		rt := attachment(pod, victim, nil)
		result, err := s.do("ADD", rt, nil)
		if err != nil {
			t.Fatal(err)
		}
		path := recordOf(t, victim)
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		damaged := damages(random, data)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if i%15 == 14 {
			err, damaged = os.MkdirAll(path+"/folder", 0o700), []byte("a folder")
		} else {
			err = os.WriteFile(path, damaged, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		s.must(t, "CHECK", attachment(s.stays, "stays", nil))
		rtOther := attachment(other, "other", nil)
		s.must(t, "ADD", rtOther)
		s.must(t, "DEL", rtOther)
		s.next++
		_, checked := s.do("CHECK", rt, nil)
		_, deleted := s.do("DEL", rt, nil)
		if i%15 == 14 { // cannot be read, and cannot be replaced: told until it is gone
			err = os.RemoveAll(path)
			_, deleted = s.do("DEL", rt, nil)
		}
		if err := errors.Join(err, coded(checked), deleted); err != nil {
			t.Errorf("record %.300q: %v", damaged, err)
		}
		if left := leaseFiles("chain"); len(left) != 2 {
			s.leaks++
			t.Errorf("record %.300q: leases %q", damaged, left)
		}
		if _, err := exec.Command("ip", "link", "show", hostSide(t, result)).Output(); err == nil {
			s.leaks++
			t.Errorf("record %.300q: the link is left", damaged)
			shell(t, "ip link del "+hostSide(t, result))
		}
		if _, err := os.Stat(path); err == nil {
			s.leaks++
			t.Errorf("record %.300q: it is left", damaged)
		}
	}
	s.report(t)
}

// recordOf finds the bridge's record of a container.
func recordOf(t testing.TB, id string) string {
	t.Helper()
	files, err := filepath.Glob("/run/podlace/chain/bridge-*")
	for _, f := range files {
		if data, e := os.ReadFile(f); e == nil && strings.Contains(string(data), `"containerID":"`+id+`"`) {
			return f
		}
	}
	t.Fatalf("no record of %s: %v", id, err)
	return ""
}

// testLockFileRemoved: pods come and go while somebody removes lock files all the time. Addresses stay unique.
func testLockFileRemoved(t *testing.T) {
	s := newSweep(t, "nftables")
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				_ = os.Remove("/run/podlace/chain/.lock")
				_ = os.Remove("/var/lib/cni/networks/chain/lock")
			}
		}
	}()
	for range some(2, 20) {
		s.crowd(t, some(10, 50))
	}
	close(stop)
	<-done
	if left := leaseFiles("chain"); len(left) != 2 {
		s.leaks++
		t.Errorf("leases %q, want those of one pod", left)
	}
	s.report(t)
}

// testLockHeld: whoever holds the lock of an attachment, and stands still, stops that one alone, and not for ever.
func testLockHeld(t *testing.T) {
	s := newSweep(t, "nftables")
	s.points++
	pod := newPod(t, victim)
	conf := rawObject(t, string(s.conflist))["plugins"].([]any)[0].(map[string]any)
	conf["name"], conf["cniVersion"] = "chain", "1.1.0"
	add := newCall("ADD", "bridge", pod, victim, conf)
	dir, release := stall(t, add)
	add.run(t).refused(t, codeTryAgain)
	other := newPod(t, "other")
	s.must(t, "ADD", attachment(other, "other", nil))
	s.must(t, "DEL", attachment(other, "other", nil))
	release()
	if err := os.WriteFile(filepath.Join(dir, "stuck"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	add.with("CNI_COMMAND", "DEL", "CNI_PATH", dir).run(t).ok(t)
	add.run(t).ok(t)
	s.next++
	add.with("CNI_COMMAND", "DEL").run(t).ok(t)
	s.report(t)
}

// stall starts an ADD whose IPAM plugin, in a folder of its own, never answers, and stops it. It returns what kills it.
func stall(t *testing.T, add call) (dir string, release func()) {
	t.Helper()
	dir = t.TempDir()
	started := filepath.Join(dir, "started")
	if err := os.WriteFile(filepath.Join(dir, "stuck"), []byte("#!/bin/sh\n: >"+started+"\nexec sleep 100\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	conf := rawObject(t, string(add.stdin)).with("ipam", object{"type": "stuck"})
	cmd := exec.Command(filepath.Join(binDir(), "bridge"))
	cmd.Stdin = bytes.NewReader(encode(conf))
	for k, v := range add.with("CNI_PATH", dir).env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	cmd.Env = append(cmd.Env, "PATH="+os.Getenv("PATH"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	await(t, "the IPAM plugin to start", func() bool { _, err := os.Stat(started); return err == nil })
	_ = cmd.Process.Signal(syscall.SIGSTOP)
	return dir, func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

// await polls until something has come about.
func await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(callLimit); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

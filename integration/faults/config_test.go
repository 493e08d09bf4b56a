// SPDX-License-Identifier: Apache-2.0

package faults

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

	"github.com/containernetworking/cni/libcni"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// TestFaultConfig runs DEL with another configuration than ADD, and attaches pods to an exhausted pool and to one with another range.
func TestFaultConfig(t *testing.T) {
	t.Run("F-41 DEL again and after edits", testDelAfterEdit)
	t.Run("F-47 address pool exhausted", testExhausted)
	t.Run("F-48 range shrunk or moved beneath live leases", testRangeMoved)
}

func testDelAfterEdit(t *testing.T) {
	s := newSweep(t, "nftables")
	first := func(o object) object { return object(o["plugins"].([]any)[0].(map[string]any)) }
	for title, edit := range harness.InOrder(map[string]func(list object){
		"not at all": func(object) {},
		"another subnet": func(o object) {
			first(o)["ipam"] = object{"type": "host-local", "subnet": "10.250.0.0/24"}
		},
		"another bridge": func(o object) { first(o)["bridge"] = "other0" },
		"other backends": func(o object) {
			first(o)["ipMasqBackend"] = "iptables"
			for _, p := range o["plugins"].([]any)[1:] {
				p.(map[string]any)["backend"] = "iptables"
			}
		},
		"no masquerade":         func(o object) { delete(first(o), "ipMasq") },
		"no IPAM":               func(o object) { delete(first(o), "ipam") },
		"another IPAM plugin":   func(o object) { first(o)["ipam"] = object{"type": "no-such-plugin"} },
		"another data folder":   func(o object) { first(o)["ipam"].(map[string]any)["dataDir"] = "/var/lib/elsewhere" },
		"values that are wrong": func(o object) { first(o)["mtu"], first(o)["vlan"] = -5, 70000 },
		"another version":       func(o object) { o["cniVersion"] = "0.4.0" },
		"bridge alone":          func(o object) { o["plugins"] = o["plugins"].([]any)[:1] },
	}) {
		s.tryCase(t, title, func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
			if _, err := s.Do("ADD", rt, nil); err != nil {
				return err
			}
			list := harness.RawObject(t, string(s.conflist))
			edit(list)
			n, err := harness.OpenNetwork(harness.Encode(list), t.TempDir(), nil)
			if err != nil {
				return err
			}
			var errs []error
			for i := range 3 {
				if i > 0 && title == "another IPAM plugin" {
					break // without the record, the plugin does not know what to release
				}
				_, err := n.Do("DEL", rt, nil)
				errs = append(errs, err)
			}
			if title == "bridge alone" { // the runtime no longer knows portmap, and calls GC later
				errs = append(errs, s.followUp(killCase{then: thenCollect, at: 1}, nil, rt))
			}
			return errors.Join(errs...)
		})
	}
	s.Report(t)
}

// testExhausted: without a free address, the error of ADD has the size of the pool, and STATUS still succeeds. ADD works after the first
// DEL.
func testExhausted(t *testing.T) {
	conf := modelConf().With("name", "full")
	y := harness.Tally{Points: 1}
	pods := map[string]*sandbox.Pod{"one-more": harness.NewPod(t, "one-more")}
	call := func(verb, id string) harness.Call { return harness.NewCall(verb, "bridge", pods[id], id, conf) }
	for i := range 5 {
		id := fmt.Sprintf("full-%d", i)
		pods[id] = harness.NewPod(t, id)
		call("ADD", id).Run(t).OK(t)
	}
	before := harness.Watch(t)
	failure := call("ADD", "one-more").Run(t).Refused(t, harness.CodeExhausted)
	if text := failure.Msg + failure.Details; !strings.Contains(text, "5 of 5") {
		t.Errorf("the error does not say how many addresses are leased: %s", text)
	}
	before.Clean(t, "the ADD that found no address")
	call("STATUS", "any").Run(t).OK(t)
	call("DEL", "full-2").Run(t).OK(t)
	call("STATUS", "any").Run(t).OK(t)
	if marks, err := filepath.Glob("/run/podlace/.logged-exhausted-*"); err != nil || len(marks) > 0 {
		t.Errorf("%v remain of a pool with free addresses, %v", marks, err)
	}
	call("ADD", "one-more").Run(t).OK(t)
	y.Next++
	for _, id := range []string{"full-0", "full-1", "full-3", "full-4", "one-more"} {
		call("DEL", id).Run(t).OK(t)
	}
	if left := leaseFiles("full"); len(left) > 0 {
		y.Leaks++
		t.Errorf("leases %q are left", left)
	}
	y.Report(t)
}

// testRangeMoved changes the range under running pods. They keep their addresses, which no new pod gets.
func testRangeMoved(t *testing.T) {
	s := newSweep(t, "nftables")
	ranged := func(from, to string) object {
		return modelConf().With("name", "moved", "bridge", "moved0", "ipam.ranges",
			[]any{[]any{map[string]any{"subnet": "10.78.0.0/24", "rangeStart": from, "rangeEnd": to}}})
	}
	wide := ranged("10.78.0.10", "10.78.0.20")
	seen := map[string]string{}
	add := func(id string, conf object) {
		s.Points++
		result := harness.NewCall("ADD", "bridge", harness.NewPod(t, id), id, conf).Run(t).OK(t).Stdout
		address := harness.Addresses(t, harness.RawObject(t, result))[0]
		if other, taken := seen[address]; taken {
			s.Duplicates++
			t.Errorf("%s of %s was given to %s", address, other, id)
		}
		seen[address] = id
	}
	for i := range 4 {
		add(fmt.Sprintf("wide-%d", i), wide)
	}
	for i, conf := range []object{ranged("10.78.0.12", "10.78.0.16"), ranged("10.78.0.30", "10.78.0.33"), ranged("10.78.0.9", "10.78.0.15"),
		wide} {
		add(fmt.Sprintf("moved-%d", i), conf)
	}
	if got := len(leaseFiles("moved")); got != len(seen) {
		t.Errorf("%d leases for %d pods", got, len(seen))
	}
	for address, id := range seen {
		if err := harness.Ping(nil, address, harness.TrafficLimit); err != nil {
			t.Errorf("%s of %s: %v", address, id, err)
		}
		harness.NewCall("DEL", "bridge", nil, id, ranged("10.78.0.100", "10.78.0.101")).Run(t).OK(t)
	}
	if left := leaseFiles("moved"); len(left) > 0 {
		s.Leaks++
		t.Errorf("leases %q are left", left)
	}
	s.Report(t)
}

// TestFaultRecords damages lock files and the records that DEL needs.
func TestFaultRecords(t *testing.T) {
	t.Run("F-05 records cut, changed, replaced", testDamagedRecords)
	t.Run("F-07 lock file of the network removed", testLockFileRemoved)
	t.Run("F-08 lock of the attachment held by a process that stands still", testLockHeld)
}

// damageRandomly returns a copy of a small file's content with random damage.
func damageRandomly(random *rand.Rand, data []byte) []byte {
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

// testDamagedRecords: DEL and GC of a pod with damaged records return a result or an error with a code. DEL with the cached result removes
// the pod's links and addresses. Other pods are unaffected.
func testDamagedRecords(t *testing.T) {
	s := newSweep(t, "nftables")
	random := kerneltest.Random(t)
	pod := harness.NewPod(t, victimID)
	other := harness.NewPod(t, "other")
	for i := range harness.Some(10, 1000) {
		s.Points++
		rt := harness.Attachment(pod, victimID, nil)
		result, err := s.Do("ADD", rt, nil)
		if err != nil {
			t.Fatal(err)
		}
		path := recordOf(t, victimID)
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		damaged := damageRandomly(random, data)
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
		s.Must(t, "CHECK", harness.Attachment(s.stays, "stays", nil))
		rtOther := harness.Attachment(other, "other", nil)
		s.Must(t, "ADD", rtOther)
		s.Must(t, "DEL", rtOther)
		s.Next++
		_, checked := s.Do("CHECK", rt, nil)
		_, deleted := s.Do("DEL", rt, nil)
		if i%15 == 14 { // DEL cannot read or replace a folder, and reports the folder until the folder is removed
			err = os.RemoveAll(path)
			_, deleted = s.Do("DEL", rt, nil)
		}
		if err := errors.Join(err, harness.Coded(checked), deleted); err != nil {
			t.Errorf("record %.300q: %v", damaged, err)
		}
		if left := leaseFiles("chain"); len(left) != 2 {
			s.Leaks++
			t.Errorf("record %.300q: leases %q", damaged, left)
		}
		if _, err := exec.Command("ip", "link", "show", hostVethOf(t, result)).Output(); err == nil {
			s.Leaks++
			t.Errorf("record %.300q: the link remains", damaged)
			harness.Shell(t, "ip link del "+hostVethOf(t, result))
		}
		if _, err := os.Stat(path); err == nil {
			s.Leaks++
			t.Errorf("record %.300q: the address remains", damaged)
		}
	}
	s.Report(t)
}

// recordOf returns the path of bridge's record of a container.
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

// testLockFileRemoved: no two pods get the same address while another program keeps removing the lock files.
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
	for range harness.Some(2, 20) {
		s.attachCrowd(t, harness.Some(10, 50))
	}
	close(stop)
	<-done
	if left := leaseFiles("chain"); len(left) != 2 {
		s.Leaks++
		t.Errorf("leases %q, want those of one pod", left)
	}
	s.Report(t)
}

// testLockHeld stops a process that holds an attachment's lock. Only this attachment is blocked: its ADD fails at its deadline.
func testLockHeld(t *testing.T) {
	s := newSweep(t, "nftables")
	s.Points++
	pod := harness.NewPod(t, victimID)
	conf := harness.RawObject(t, string(s.conflist))["plugins"].([]any)[0].(map[string]any)
	conf["name"], conf["cniVersion"] = "chain", "1.1.0"
	add := harness.NewCall("ADD", "bridge", pod, victimID, conf)
	dir, release := stallADD(t, add)
	add.Run(t).Refused(t, harness.CodeTryAgain)
	other := harness.NewPod(t, "other")
	s.Must(t, "ADD", harness.Attachment(other, "other", nil))
	s.Must(t, "DEL", harness.Attachment(other, "other", nil))
	release()
	if err := os.WriteFile(filepath.Join(dir, "stuck"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	add.With("CNI_COMMAND", "DEL", "CNI_PATH", dir).Run(t).OK(t)
	add.Run(t).OK(t)
	s.Next++
	add.With("CNI_COMMAND", "DEL").Run(t).OK(t)
	s.Report(t)
}

// stallADD stops an ADD with SIGSTOP while its IPAM plugin gives no answer. The returned function kills the stopped process.
func stallADD(t *testing.T, add harness.Call) (dir string, release func()) {
	t.Helper()
	dir = t.TempDir()
	started := filepath.Join(dir, "started")
	if err := os.WriteFile(filepath.Join(dir, "stuck"), []byte("#!/bin/sh\n: >"+started+"\nexec sleep 100\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	conf := harness.RawObject(t, string(add.Stdin)).With("ipam", object{"type": "stuck"})
	cmd := exec.Command(filepath.Join(harness.BinDir(), "bridge"))
	cmd.Stdin = bytes.NewReader(harness.Encode(conf))
	for k, v := range add.With("CNI_PATH", dir).Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	cmd.Env = append(cmd.Env, "PATH="+os.Getenv("PATH"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	harness.Await(t, "the IPAM plugin to start", func() bool { _, err := os.Stat(started); return err == nil })
	_ = cmd.Process.Signal(syscall.SIGSTOP)
	return dir, func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

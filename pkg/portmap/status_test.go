// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"bytes"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// If the rules are flushed while another process holds the lock of the ports, STATUS succeeds at once without restoring them, and logs only
// the durations of its phases. The next STATUS restores the rules and logs that (C-72).
func TestStatusNeverWaits(t *testing.T) {
	eachBackend(t, func(l testLab) {
		l.OK(l.Call("ADD", "a"))
		if err := kerneltest.FlushNFT(); err != nil {
			l.Fatal(err)
		}
		var log bytes.Buffer
		l.Stderr = &log
		status := func() string {
			l.Helper()
			log.Reset()
			l.OK(l.Call("STATUS", ""))
			lines := slices.Collect(strings.Lines(log.String()))
			return strings.Join(slices.DeleteFunc(lines, func(line string) bool { return strings.Contains(line, "msg=phase ") }), "")
		}
		unlock, err := attachment.Waiting.Node(portsLock)
		if err != nil {
			l.Fatal(err)
		}
		began := time.Now()
		if says := status(); says != "" || time.Since(began) >= store.NodeLockTimeout {
			l.Errorf("it waited %v for a lock, or restored without one: %s", time.Since(began), says)
		}
		l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, "missing")
		unlock()
		if strings.HasSuffix(l.Name(), "/iptables") {
			table, err := iptables.Open(true, true)
			if err != nil {
				l.Fatal(err)
			}
			began = time.Now()
			if status(); time.Since(began) >= store.NodeLockTimeout {
				l.Errorf("it waited %v for the lock of iptables", time.Since(began))
			}
			table.Close()
		}
		if says := status(); !strings.Contains(says, "restored from the records") {
			l.Errorf("it does not log what it restores: %s", says)
		}
		l.OK(l.Call("CHECK", "a"))
		if says := status(); strings.Contains(says, "restored") {
			l.Errorf("it restores state that exists: %s", says)
		}
		l.OK(l.Call("DEL", "a"))
	})
}

// GC restores any flushed rules and logs it once (F-21).
func TestGCRestores(t *testing.T) {
	kerneltest.Slow(t)
	eachBackend(t, func(l testLab) {
		l.OK(l.Call("ADD", "a"))
		var log bytes.Buffer
		l.Stderr = &log
		gc := func() string {
			l.Helper()
			log.Reset()
			l.OK(l.Call("GC", "", "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}))
			return log.String()
		}
		flushes := []string{"nft flush ruleset", "nft flush map inet podlace_hostport ports4", "nft delete table inet podlace_loopback"}
		if l.Conf["backend"] == "iptables" {
			flushes = []string{"nft flush ruleset", "iptables -t nat -F " + dnatChain}
		}
		for _, flush := range flushes {
			words := strings.Fields(flush)
			if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
				l.Fatalf("%s: %v %s", flush, err, out)
			}
			if says := gc(); !strings.Contains(says, "restored") {
				l.Errorf("%s: GC does not log what it restores: %s", flush, says)
			}
			l.OK(l.Call("CHECK", "a"))
			if says := gc(); strings.Contains(says, "restored") {
				l.Errorf("%s: GC restores state that exists: %s", flush, says)
			}
		}
		l.OK(l.Call("DEL", "a"))
	})
}

// If rules cannot be restored because another program's chain is missing, repeated STATUS calls log it once, but each of the rare GCs does
// (C-72).
func TestStatusTellsLastingFaultOnce(t *testing.T) {
	l := newLab(t)
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	if out, err := exec.Command("sh", "-c",
		"iptables -t nat -N KUBE-MARK-MASQ && ip6tables -t nat -N KUBE-MARK-MASQ").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	l.Conf = l.Conf.With("backend", "iptables", "externalSetMarkChain", "KUBE-MARK-MASQ")
	l.OK(l.Call("ADD", "a"))
	if err := kerneltest.FlushNFT(); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	l.Stderr = &log
	warnings := func(verb string, keys ...any) int {
		log.Reset()
		for range 3 {
			l.OK(l.Call(verb, "", keys...))
		}
		return strings.Count(log.String(), "could not restore")
	}
	if n := warnings("STATUS"); n != 1 {
		t.Errorf("%d warnings of three STATUS, want 1: %s", n, log.String())
	}
	if n := warnings("GC", "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}); n != 3 {
		t.Errorf("%d warnings of three GC, want 3: %s", n, log.String())
	}
	l.OK(l.Call("DEL", "a"))
}

// With the iptables backend, STATUS starts no program to find out whether the rules are intact (F-21).
func TestStatusStartsNothing(t *testing.T) {
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := newLab(t)
	l.Conf = l.Conf.With("backend", "iptables")
	if iptables.LegacyUsed(true) || iptables.LegacyUsed(false) {
		t.Skip("SKIPPED: iptables is that of the older xtables")
	}
	l.OK(l.Call("ADD", "a"))
	faults := func() int64 { // page faults of ended child processes
		var used unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_CHILDREN, &used); err != nil {
			t.Fatal(err)
		}
		return used.Minflt
	}
	before := faults()
	l.OK(l.Call("STATUS", ""))
	if after := faults(); after != before {
		t.Errorf("STATUS started a program: %d page faults", after-before)
	}
	if err := kerneltest.FlushNFT(); err != nil {
		t.Fatal(err)
	}
	l.OK(l.Call("STATUS", ""))
	if faults() == before || !l.isMapped("a") {
		t.Error("STATUS did not restore the rules")
	}
	l.OK(l.Call("DEL", "a"))
}

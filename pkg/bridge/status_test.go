// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"fmt"
	"log/slog"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// TestStatusRestores (F-21): after a flush, CHECK fails and changes nothing, whereas STATUS and GC restore masquerade, guards and the rules
// of VLAN gateways from the records, and log this. They do not wait for locks that other processes hold.
func TestStatusRestores(t *testing.T) {
	kerneltest.Slow(t)
	tables := func(names ...string) []string {
		var commands []string
		for _, name := range names {
			commands = append(commands, "nft flush table "+name)
		}
		return append(commands, "nft flush ruleset")
	}
	for what, c := range map[string]struct {
		keys    []any
		flushes []string
	}{
		"masquerade": {nil, tables("inet podlace_masquerade")},
		"iptables":   {[]any{"ipMasqBackend", "iptables"}, tables()},
		"guards":     {[]any{"antiSpoof", true, "ipMasq", false}, tables("bridge podlace_guard")},
		"VLAN":       {[]any{"vlan", 5, "ipMasq", false}, tables("inet podlace_vlan")},
	} {
		t.Run(what, func(t *testing.T) { testStatusRestores(t, what, c.keys, c.flushes) })
	}
}

func testStatusRestores(t *testing.T, what string, keys []any, flushes []string) {
	if what == "iptables" && (!iptables.Installed(true) || !iptables.Installed(false)) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	bridge := "btst" + what[:2]
	l := bareLab(t, append([]any{"name", "restores" + what, "bridge", bridge, "ipam", hostLocal("10.73.0.0/24")}, keys...)...)
	if o := l.Call("STATUS", ""); what == "VLAN" && o.Exit != 0 {
		t.Skip("SKIPPED: the kernel has no VLAN filtering")
	}
	t.Cleanup(func() { _ = onHost(bridge, netlink.LinkDel) })
	if o := l.OK(l.Call("ADD", "first")); strings.Contains(o.Log, "restored") {
		t.Errorf("the first pod restores something: %s", o.Log)
	}
	l.OK(l.Call("DEL", "first"))
	a := l.add("a")
	l.OK(a.check())
	for _, flush := range flushes {
		a.mustBeRestoredBy("STATUS", flush)
		a.mustBeRestoredBy("GC", flush, "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}})
	}
}

// mustBeRestoredBy expects a CNI operation to restore the rules that a shell command flushes.
func (a attached) mustBeRestoredBy(verb, flush string, keys ...any) {
	a.Helper()
	if out, err := exec.Command("sh", "-c", flush).CombinedOutput(); err != nil {
		a.Fatalf("%s: %v %s", flush, err, out)
	}
	for range 2 {
		a.Fails(a.check(), plugin.CodeStateDiffers, "")
	}
	if o := a.OK(a.Call(verb, "", keys...)); !strings.Contains(o.Log, "restored from the records") {
		a.Errorf("%s after %s does not log it: %s", verb, flush, o.Log)
	}
	if o := a.check(); o.Exit != 0 {
		a.Errorf("%s, then %s: CHECK: %s", flush, verb, o.Stdout)
	}
	if o := a.OK(a.Call(verb, "", keys...)); strings.Contains(o.Log, "restored") {
		a.Errorf("the next %s restores state that exists: %s", verb, o.Log)
	}
}

// TestStatusNeverWaits (C-72): while others hold the locks, STATUS succeeds, but restores and logs nothing. The next one restores the
// rules.
func TestStatusNeverWaits(t *testing.T) {
	l := bareLab(t, "name", "busy", "bridge", "btsb", "ipam", hostLocal("10.74.0.0/24"), "antiSpoof", true)
	t.Cleanup(func() { _ = onHost("btsb", netlink.LinkDel) })
	a := l.add("a")
	if err := kerneltest.FlushNFT(); err != nil {
		t.Fatal(err)
	}
	unlock, err := attachment.Waiting.Node(bridges)
	if err != nil {
		t.Fatal(err)
	}
	network, err := attachment.Waiting.Key(attachment.Key{Network: "busy"})
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if o := l.OK(l.Call("STATUS", "")); o.Log != "" || time.Since(began) >= store.LockTimeout {
		t.Errorf("it waited %v for a lock, or restored without one: %s", time.Since(began), o.Log)
	}
	l.Fails(a.check(), plugin.CodeStateDiffers, "missing")
	unlock()
	network.Close()
	l.OK(l.Call("STATUS", ""))
	l.OK(a.check())
}

// TestStatusNeverWaitsForIPTables: STATUS does not wait for the iptables lock. The next one after its release restores the rules.
func TestStatusNeverWaitsForIPTables(t *testing.T) {
	if !iptables.Installed(true) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := bareLab(t, "name", "busy", "bridge", "btsi", "ipam", hostLocal("10.74.1.0/24"), "isGateway", true, "ipMasq", true,
		"ipMasqBackend", "iptables", "hairpinMode", false)
	t.Cleanup(func() { _ = onHost("btsi", netlink.LinkDel) })
	a := l.add("a")
	if err := kerneltest.FlushNFT(); err != nil {
		t.Fatal(err)
	}
	table, err := iptables.Open(true, true)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if o := l.OK(l.Call("STATUS", "")); o.Log != "" || time.Since(began) >= store.NodeLockTimeout {
		t.Errorf("it waited %v for a lock, or restored without one: %s", time.Since(began), o.Log)
	}
	table.Close()
	l.Fails(a.check(), plugin.CodeStateDiffers, "missing")
	l.OK(l.Call("STATUS", ""))
	l.OK(a.check())
}

// TestStatusAfterYoungerPods: after a flush of iptables, STATUS finds the missing rules of older pods, although pods that were attached
// later have theirs. This includes rules of only one address family, and a pod whose ADD was killed.
func TestStatusAfterYoungerPods(t *testing.T) {
	kerneltest.Slow(t)
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := bareLab(t, "name", "younger", "bridge", "btyng", "ipMasqBackend", "iptables", "hairpinMode", false)
	t.Cleanup(func() { _ = onHost("btyng", netlink.LinkDel) })
	l.add("killed")
	unfinish(t, l, "killed")
	old := l.other().add("old")
	for i, flush := range []string{"nft flush ruleset", "ip6tables -t nat -F && ip6tables -t nat -X"} {
		l.run(flush)
		for j := range 6 {
			l.other().add(fmt.Sprintf("young-%d-%d", i, j))
		}
		l.Fails(old.check(), plugin.CodeStateDiffers, "masquerade")
		l.OK(l.Call("STATUS", ""))
		l.OK(old.check())
	}
}

// TestStatusWithoutPods (F-21): STATUS, GC and Restore create no nftables table on a node without pods.
func TestStatusWithoutPods(t *testing.T) {
	l := bareLab(t, "antiSpoof", true)
	if err := kerneltest.FlushNFT(); err != nil {
		t.Fatal(err)
	}
	l.OK(l.Call("STATUS", ""))
	l.OK(l.Call("GC", "", "cni.dev/valid-attachments", []any{}))
	if err := Restore(l.host(), slog.Default(), attachment.Waiting); err != nil {
		t.Error(err)
	}
	if out, err := exec.Command("nft", "list", "tables").Output(); err != nil || len(out) > 0 {
		t.Errorf("%s, %v", out, err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
)

// nft() runs nft(8). In the command, nft() replaces NET with the suffix of the network's set names, and HOST with the name of the pod's
// host side.
func (a attached) nft(command string) {
	a.Helper()
	words := strings.NewReplacer("NET", MasqueradeSets{Network: a.network()}.name(), "HOST", a.hostVeth()).Replace(command)
	if out, err := exec.Command("nft", words).CombinedOutput(); err != nil {
		a.Fatalf("nft %s: %v: %s", words, err, out)
	}
}

// collect() runs GC. The request lists only the attachments of the given container IDs as valid.
func (a attached) collect(ids ...string) {
	a.Helper()
	var valid []any
	for _, id := range ids {
		valid = append(valid, object{"containerID": id, "ifname": "eth0"})
	}
	a.OK(a.Call("GC", "", "cni.dev/valid-attachments", valid))
}

// inSecondSubnet returns a lab in the same network whose pods get addresses from 10.61.0.0/24. After the pods of this lab are deleted,
// 10.61.0.0/24 stays in the network's masquerade sets.
func (l lab) inSecondSubnet() lab {
	second := l.other()
	ranges := []any{[]any{object{"subnet": "10.61.0.0/24"}}}
	second.Conf = second.Conf.With("isGateway", false, "isDefaultGateway", false, "ipam", object{"type": "host-local", "ranges": ranges})
	l.Cleanup(func() {
		name := MasqueradeSets{Network: l.network()}.name()
		for _, set := range []string{"pods4-", "local4-"} {
			l.run("nft delete element inet podlace_masquerade " + set + name + " '{ 10.61.0.0/24 }'")
		}
	})
	return second
}

// TestForeignIntervals (C-63) checks that CHECK reports an address interval that another program added to the network's nftables sets.
// GC removes this interval. GC keeps the intervals of a pod even if the pod's record is lost.
func TestForeignIntervals(t *testing.T) {
	kerneltest.Slow(t)
	needNFT(t)
	l := newLab(t, "ipMasqBackend", "nftables", "ipMasq", object{"nonMasqueradeCIDRs": []any{"192.0.2.0/24"}})
	a := l.add("a")
	b := l.other().add("b")
	lost := l.inSecondSubnet().add("lost")
	lost.loseRecord()
	before := kerneltest.Records(t, "nft element inet podlace_masquerade")
	for _, element := range []string{"local4-NET { 0.0.0.0/5 }", "local4-NET { 198.51.100.7 }", "local6-NET { 2000::/3 }",
		"pods4-NET { 172.16.0.0/12 }"} {
		a.nft("add element inet podlace_masquerade " + element)
		a.Fails(a.check(), plugin.CodeStateDiffers, "which no pod needs")
		a.collect("a", "b", "lost")
		if diff := cmp.Diff(before, kerneltest.Records(t, "nft element inet podlace_masquerade")); diff != "" {
			t.Errorf("%s: GC left another set: %s", element, diff)
		}
		a.OK(a.check())
		b.OK(b.check())
	}
}

// TestNoForeignIntervals checks that CHECK and GC accept three kinds of intervals: subnets of other pods, subnets of deleted pods, and
// configured exceptions.
func TestNoForeignIntervals(t *testing.T) {
	kerneltest.Slow(t)
	needNFT(t)
	masquerade := func(cidr string) object { return object{"nonMasqueradeCIDRs": []any{cidr}} }
	l := newLab(t, "ipMasqBackend", "nftables", "ipMasq", masquerade("192.0.2.0/24"))
	a := l.add("a")
	second := l.inSecondSubnet()
	b := second.add("b")
	third := second.other()
	third.OK(third.Call("ADD", "c"))
	check := func() {
		t.Helper()
		a.OK(a.check())
		b.OK(b.check())
	}
	check()
	third.OK(third.Call("DEL", "c"))
	check()
	b.OK(b.Call("DEL", "b"))
	a.OK(a.check())
	a.collect("a")
	a.OK(a.check())
}

// TestForeignGuards (C-63) checks that GC deletes guard table entries that another program added for a guarded port. GC must keep the guard
// entries of ports without a record.
func TestForeignGuards(t *testing.T) {
	needNFT(t)
	l := newLab(t, "antiSpoof", true)
	a := l.add("a")
	b := l.other().add("b")
	b.loseRecord()
	before := kerneltest.Records(t, "nft element bridge podlace_guard")
	for _, element := range []string{`addresses4 { "HOST" . 10.60.0.99 }`, `addresses6 { "HOST" . fd00:60::99 }`,
		`macs { "HOST" . 02:00:00:00:00:99 }`} {
		a.nft("add element bridge podlace_guard " + element)
		a.collect("a", "b")
		if diff := cmp.Diff(before, kerneltest.Records(t, "nft element bridge podlace_guard")); diff != "" {
			t.Errorf("%s: %s", element, diff)
		}
	}
	a.OK(a.check())
	b.Fails(b.check(), plugin.CodeStateDiffers, "the record of bridge is missing")
}

func needNFT(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("SKIPPED: nft is not installed")
	}
}

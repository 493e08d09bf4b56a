// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/plugin"
)

// filters runs tc(8) commands, in which HOST is the host side of the pod's veth pair, and IFB the ifb device of attachment "a". ok is false
// if the kernel lacks a classifier or an action.
func (l lab) filters(t *testing.T, script string) (ok bool) {
	t.Helper()
	words := strings.NewReplacer("HOST", l.hostSide.Name, "IFB", l.ifb("a"), "ALL", "protocol all u32 match u32 0 0")
	out, err := exec.Command("sh", "-ec", words.Replace(script)).CombinedOutput()
	lacks := strings.Contains(string(out), "not found") || strings.Contains(string(out), "Failed to load")
	if err != nil && !lacks {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
	return kerneltest.Feature(t, err == nil, "filter of "+script)
}

const (
	receiving = "tc filter add dev HOST ingress "
	sending   = "tc filter add dev HOST egress "
	elsewhere = "action mirred egress redirect dev lo"
)

// CHECK fails if another program's filter drops or redirects all frames before the limit can count them (C-64).
func TestCheckTellsFilters(t *testing.T) {
	kerneltest.Slow(t)
	if _, err := exec.LookPath("tc"); err != nil {
		t.Skip("SKIPPED: tc is not installed")
	}
	for title, c := range map[string]struct{ script, says string }{
		"u32 redirects elsewhere":   {receiving + "pref 1 ALL " + elsewhere, "takes all frames"},
		"of IPv4 alone":             {receiving + "pref 1 protocol ip u32 match u32 0 0 " + elsewhere, "takes all frames"},
		"just ahead":                {receiving + "pref 65534 ALL " + elsewhere, "pref 65534"},
		"u32 mirrors and lets pass": {receiving + "pref 1 ALL action mirred egress mirror dev lo", "takes all frames"},
		"u32 without action":        {receiving + "pref 1 ALL flowid 1:1", "takes all frames"},
		"sending side redirects":    {sending + "pref 1 ALL " + elsewhere, "(egress) takes all frames"},
		"ifb device redirects":      {"tc qdisc add dev IFB clsact\ntc filter add dev IFB egress ALL " + elsewhere, "takes all frames"},
		"redirects to a link that went": {"ip link add gone0 type veth peer name gone1\n" + receiving +
			"pref 1 ALL action mirred egress redirect dev gone0\nip link del gone0", "drops all frames"},
		"matchall drops":          {receiving + "pref 1 matchall action drop", "(ingress) drops all frames: matchall, chain 0, pref 1"},
		"matchall lets pass":      {receiving + "pref 1 matchall action ok", "takes all frames"},
		"matchall without action": {receiving + "pref 1 matchall flowid 1:1", "takes all frames"},
		"polices and lets pass":   {receiving + "pref 1 matchall action police rate 1mbit burst 10k conform-exceed drop/ok", "takes all"},
		"edits and lets pass":     {receiving + "pref 1 matchall action skbedit mark 1", "takes all frames"},
		"goes to a chain that drops": {receiving + "pref 1 chain 3 matchall action drop\n" + receiving +
			"pref 1 matchall action goto chain 3", "drops all frames"},
		"goes to an empty chain": {receiving + "pref 1 matchall action goto chain 3", "takes all frames"},
		"sending side drops":     {sending + "pref 1 matchall action drop", "(egress) drops all frames"},
		"sending side goes to one": {sending + "pref 1 chain 3 matchall action drop\n" + sending +
			"pref 1 matchall action goto chain 3", "drops all frames"},
	} {
		t.Run(title, func(t *testing.T) {
			l := newLab(t)
			l.OK(l.Call("ADD", "a"))
			l.OK(l.Call("CHECK", "a"))
			if l.filters(t, c.script) {
				l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, c.says)
			}
			l.filters(t, "tc qdisc del dev HOST clsact") // DEL keeps a qdisc with other programs' filters
			l.OK(l.Call("DEL", "a"))
		})
	}
}

// CHECK accepts other programs' filters that do not bypass a limit.
func TestCheckAllowsFilters(t *testing.T) {
	kerneltest.Slow(t)
	if _, err := exec.LookPath("tc"); err != nil {
		t.Skip("SKIPPED: tc is not installed")
	}
	l := newLab(t)
	l.OK(l.Call("ADD", "a"))
	for title, script := range map[string]string{
		"one source":               receiving + "pref 2 protocol ip u32 match ip src 192.0.2.1/32 " + elsewhere,
		"another protocol":         receiving + "pref 3 protocol 802.1Q u32 match u32 0 0 " + elsewhere,
		"a chain that none enters": receiving + "pref 1 chain 7 ALL " + elsewhere,
		"as ours, behind it":       receiving + "pref 65535 ALL " + elsewhere,
		"sending side mirrors":     sending + "pref 4 ALL action mirred egress mirror dev lo",
		"sending side passes":      sending + "pref 5 ALL flowid 1:1",
		"statistics":               receiving + "pref 6 matchall action continue",
		"mark, then continue":      receiving + "pref 7 matchall action skbedit mark 1 pipe action continue",
		"police, then continue":    receiving + "pref 8 matchall action police rate 10gbit burst 10m conform-exceed drop/continue",
		"flower of one port":       receiving + "pref 9 protocol ip flower ip_proto tcp dst_port 25 action drop",
		"sending side of IPv4":     sending + "pref 10 protocol ip matchall action ok",
		"drops another protocol":   sending + "pref 11 protocol 802.1Q matchall action drop",
		"a mark":                   receiving + "pref 12 protocol ip handle 5 fw action drop",
	} {
		t.Run(title, func(t *testing.T) {
			if l.filters(t, script) {
				l.OK(l.Call("CHECK", "a"))
			}
		})
	}
	l.must(Restore(l.host, discard()))
	l.OK(l.Call("CHECK", "a"))
	l.filters(t, "tc qdisc del dev HOST clsact")
	l.OK(l.Call("DEL", "a"))
}

// TestProgramAheadOfLimit: a BPF classifier that accepts a pod's frames before they are redirected switches the egress limit off, which
// CHECK and 'podlace limits' tell. Only the program knows its verdict, so CHECK does not fail.
func TestProgramAheadOfLimit(t *testing.T) {
	if _, err := exec.LookPath("tc"); err != nil {
		t.Skip("SKIPPED: tc is not installed")
	}
	l := newLab(t)
	l.OK(l.Call("ADD", "a"))
	bypass := func() string {
		records, err := attachment.AllOf(pluginName)
		l.must(err)
		list, err := Read(l.host, records)
		l.must(err)
		return list[0].Egress.Bypass
	}
	if o := l.OK(l.Call("CHECK", "a")); o.Log != "" || bypass() != "" {
		t.Errorf("without the classifier: %s %s", o.Log, bypass())
	}
	if l.filters(t, receiving+"pref 3 bpf bytecode '1,6 0 0 4294967295' flowid 1:1") {
		if o := l.OK(l.Call("CHECK", "a")); !strings.Contains(o.Log, "may switch the limit off") || !strings.Contains(bypass(), "bpf, pref 3") {
			t.Errorf("log %q, bypass %q", o.Log, bypass())
		}
	}
	l.filters(t, "tc qdisc del dev HOST clsact")
	l.OK(l.Call("DEL", "a"))
}

// TestForeignRootQdiscIsNamed: ADD names another program's root qdisc that the ingress limit replaces.
func TestForeignRootQdiscIsNamed(t *testing.T) {
	if _, err := exec.LookPath("tc"); err != nil {
		t.Skip("SKIPPED: tc is not installed")
	}
	l := newLab(t)
	if o := l.OK(l.Call("ADD", "a")); strings.Contains(o.Log, "root qdisc") {
		t.Error(o.Log)
	}
	l.OK(l.Call("DEL", "a"))
	if l.filters(t, "tc qdisc add dev HOST root handle 7: pfifo limit 10") {
		o := l.OK(l.Call("ADD", "a"))
		if !strings.Contains(o.Log, "root qdisc of another program is replaced") || !strings.Contains(o.Log, "qdisc=pfifo") {
			t.Errorf("log: %s", o.Log)
		}
		l.OK(l.Call("DEL", "a"))
	}
}

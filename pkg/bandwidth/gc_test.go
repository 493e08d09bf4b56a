// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/plugin"
)

// TestGCRestores (F-21): GC restores the limits of valid attachments whose qdiscs another program removed, and logs it. CHECK changes nothing,
// and STATUS, which comes every few seconds, looks at no qdisc.
func TestGCRestores(t *testing.T) {
	l := newLab(t)
	l.ok(l.call("ADD", "a"))
	gc := func() outcome {
		return l.call("GC", "", "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}, "runtimeConfig", nil, "prevResult", nil)
	}
	for what, lose := range map[string]func() error{
		"ingress": func() error { return l.host.Unshape(l.hostSide) },
		"egress":  func() error { return l.host.DelLink(l.ifb("a")) },
	} {
		l.must(lose())
		for range 2 {
			l.fails(l.call("CHECK", "a"), plugin.CodeStateDiffers, "missing")
		}
		l.ok(l.call("STATUS", ""))
		l.fails(l.call("CHECK", "a"), plugin.CodeStateDiffers, "missing")
		if o := l.ok(gc()); !strings.Contains(o.stderr, "restored from the record") || !strings.Contains(o.stderr, what) {
			t.Errorf("GC does not log it: %s", o.stderr)
		}
		l.ok(l.call("CHECK", "a"))
		if got := l.applied("a"); got != "20000000/10000000 redirected true" {
			t.Errorf("after GC: %s", got)
		}
	}
	if o := l.ok(gc()); strings.Contains(o.stderr, "restored") {
		t.Errorf("GC restores what is in place: %s", o.stderr)
	}
	l.ok(l.call("DEL", "a", "CNI_NETNS", ""))
}

// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// After another program removed the qdiscs, GC and STATUS restore the limits and log the repair; CHECK changes nothing (F-21).
func TestRestoredByVerbs(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a"))
	for verb, call := range map[string]func() outcome{
		"GC": func() outcome {
			return l.Call("GC", "", "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}, "runtimeConfig", nil,
				"prevResult", nil)
		},
		"STATUS": func() outcome { return l.Call("STATUS", "") },
	} {
		for what, lose := range map[string]func() error{
			"ingress": func() error { return l.host.Unshape(l.hostSide) },
			"egress":  func() error { return l.host.DelLink(l.ifb("a")) },
		} {
			l.must(lose())
			for range 2 {
				l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, "missing")
			}
			if o := l.OK(call()); !strings.Contains(o.Log, "restored from the record") || !strings.Contains(o.Log, what) {
				t.Errorf("%s does not log it: %s", verb, o.Log)
			}
			l.OK(l.Call("CHECK", "a"))
			if got := l.applied("a"); got != "20000000/10000000 redirected true" {
				t.Errorf("after %s: %s", verb, got)
			}
		}
		if o := l.OK(call()); strings.Contains(o.Log, "restored") {
			t.Errorf("%s restores state that exists: %s", verb, o.Log)
		}
	}
	l.OK(l.Call("DEL", "a", "CNI_NETNS", ""))
}

// While another process holds the attachment's lock, STATUS succeeds without restoring or logging anything. A pod's deleted link is logged
// only once (C-72).
func TestStatusNeverWaits(t *testing.T) {
	l := connected(t)
	l.OK(l.Call("ADD", "a"))
	l.must(l.host.Unshape(l.hostSide))
	holder, err := attachment.Waiting.Key(l.key("a"))
	l.must(err)
	began := time.Now()
	if o := l.OK(l.Call("STATUS", "")); o.Log != "" || time.Since(began) >= store.LockTimeout {
		t.Errorf("it waited %v for a lock, or restored without one: %s", time.Since(began), o.Log)
	}
	holder.Close()
	l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, "missing")
	l.must(l.host.DelLink(l.hostSide.Name))
	says := ""
	for range 3 {
		says += l.OK(l.Call("STATUS", "")).Log
	}
	if n := strings.Count(says, "\n"); n != 1 || !strings.Contains(says, "link bwt0 is missing") {
		t.Errorf("%d lines of a lost link, want 1: %s", n, says)
	}
	l.OK(l.Call("DEL", "a", "CNI_NETNS", ""))
}

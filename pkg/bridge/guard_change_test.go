// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
)

// TestGuardOfNewConfiguration: after a change of the configuration, pods keep the protection from their ADD. CHECK passes, with a warning
// if it is weaker than configured; STATUS and GC leave their guards, and DEL removes everything. CHECK reports a lost record, because
// Podlace's masquerade rules show who attached the pod.
func TestGuardOfNewConfiguration(t *testing.T) {
	kerneltest.Slow(t)
	protections := map[string][]any{"nothing": nil, "macspoofchk": {"macspoofchk", true}, "antiSpoof": {"antiSpoof", true}}
	strength := map[string]int{"nothing": 0, "macspoofchk": 1, "antiSpoof": 2}
	for before, old := range protections {
		for after, now := range protections {
			for name, recorded := range map[string]bool{"recorded": true, "without a record": false} {
				t.Run(before+" to "+after+" "+name, func(t *testing.T) {
					l := newLab(t, "name", "changed", "bridge", "btg9", "antiSpoof", true)
					l.Conf = l.Conf.With("antiSpoof", nil)
					a := l.add("a", old...)
					if !recorded {
						a.loseRecord()
					}
					l.OK(l.Call("STATUS", "", now...))
					l.OK(l.Call("GC", "", append([]any{"cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}}, now...)...))
					check := func(protection string) string {
						o := a.check(protections[protection]...)
						if !recorded {
							l.Fails(o, plugin.CodeStateDiffers, "the record of bridge is missing")
						} else {
							l.OK(o)
						}
						return o.Log
					}
					log := check(after)
					if less := strength[before] < strength[after]; strings.Contains(log, "lacks the configured spoof protection") != less {
						t.Errorf("warning %t, want %t: %s", !less, less, log)
					}
					check(before)
					b := l.other().add("b", now...)
					b.OK(b.check(now...))
					check(after)
					l.OK(l.Call("DEL", "a", append([]any{"prevResult", a.prev}, now...)...))
				})
			}
		}
	}
}

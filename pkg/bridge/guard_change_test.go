// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"strings"
	"testing"
)

// TestGuardOfNewConfiguration: pods keep the protection that they were added with. When the configuration gets another one, CHECK of these
// pods passes, with a warning if they have less than it asks for; STATUS and GC leave them as they are, and DEL leaves nothing. So it is
// without a record: then the pod may be one of the reference.
func TestGuardOfNewConfiguration(t *testing.T) {
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
					log := l.OK(a.check(now...)).Log
					if less := strength[before] < strength[after]; strings.Contains(log, "added without") != less {
						t.Errorf("warning %t, want %t: %s", !less, less, log)
					}
					l.OK(a.check(old...))
					b := l.other().add("b", now...)
					b.OK(b.check(now...))
					l.OK(a.check(now...))
					l.OK(l.Call("DEL", "a", append([]any{"prevResult", a.prev}, now...)...))
				})
			}
		}
	}
}

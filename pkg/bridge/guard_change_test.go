// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"strings"
	"testing"

	"github.com/google/nftables"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/nft"
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

// TestGuardOfAnotherVersion: ADD replaces the rules of a guard that an older version of the plugin wrote. CHECK only warns of them, because
// an upgrade must not end running pods.
func TestGuardOfAnotherVersion(t *testing.T) {
	l := newLab(t, "name", "versions", "bridge", "btver", "antiSpoof", true)
	a := l.add("a")
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	table := nft.TableOf(nft.GuardTable).Netlink()
	set, err := c.GetSetByName(table, "schema")
	if err != nil {
		t.Fatal(err)
	}
	mark, err := c.GetSetElements(set)
	if err != nil || len(mark) != 1 {
		t.Fatal(mark, err)
	}
	older := mark[0]
	older.Key = nft.BigEndian(guardSchema().Version - 1)
	kerneltest.Must(t, c.SetDeleteElements(set, mark), c.SetAddElements(set, []nftables.SetElement{older}), c.Flush())
	if o := l.OK(a.check()); !strings.Contains(o.Log, "the rules of nftables table bridge podlace_guard are those of another version") {
		t.Errorf("CHECK does not warn: %s", o.Log)
	}
	l.other().add("b")
	if o := l.OK(a.check()); strings.Contains(o.Log, "of another version") {
		t.Errorf("ADD has not replaced the rules: %s", o.Log)
	}
}

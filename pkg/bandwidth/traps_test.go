// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"fmt"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/attachment"
)

const trapped = "does not have the effect that it suggests"

// addLog attaches a container and returns the plugin's log.
func (l lab) addLog(id string, keys ...any) string {
	l.Helper()
	log := l.OK(l.Call("ADD", id, keys...)).Log
	l.OK(l.Call("DEL", id, keys...))
	return log
}

// If the capability is missing or misspelt, the runtime passes no limits, so all pods look like pods without any. The first ADD logs that,
// later ones do not, and a changed configuration is logged again.
func TestMissingCapabilityIsLoggedOnce(t *testing.T) {
	for name, c := range map[string]struct {
		keys []any
		says string
	}{
		"none":                     {nil, `key=capabilities finding="without {\"bandwidth\": true} the runtime passes no bandwidth, so no pod is limited"`},
		"misspelt":                 {[]any{"capabilities", object{"bandwith": true}}, `key=capabilities.bandwith`},
		"off":                      {[]any{"capabilities", object{"bandwidth": false}}, "no pod is limited"},
		"a pod that wants nothing": {[]any{"capabilities", object{"bandwidth": true}}, ""},
		"misspelt beside limits": {[]any{"ingressRate", 1000000, "ingressBurst", 80000, "capabilities", object{"bandwith": true}},
			`key=capabilities.bandwith`},
		"limits of all pods": {[]any{"ingressRate", 1000000, "ingressBurst", 80000}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			l := connected(t)
			t.Cleanup(func() { _ = attachment.RemoveNote(attachment.OfNode, "logged-found-bandwidth-traps") })
			keys := append([]any{"name", "traps", "runtimeConfig", nil}, c.keys...)
			first, next := l.addLog("first", keys...), l.addLog("next", keys...)
			if strings.Contains(first, trapped) != (c.says != "") || !strings.Contains(first, c.says) {
				t.Errorf("want %q in:\n%s", c.says, first)
			}
			if strings.Contains(next, trapped) {
				t.Errorf("the next ADD says it again:\n%s", next)
			}
			if c.says != "" {
				l.addLog("mended", append(keys, "capabilities", object{"bandwidth": true})...)
				if again := l.addLog("again", keys...); !strings.Contains(again, c.says) {
					t.Errorf("a mistake that comes back is not said:\n%s", again)
				}
			}
			if changed := l.addLog("changed", append(keys, "capabilities", object{"bandwiths": true})...); c.says != "" &&
				!strings.Contains(changed, "capabilities.bandwiths") {
				t.Errorf("another mistake is not said:\n%s", changed)
			}
		})
	}
}

func TestFindingsOfConfiguration(t *testing.T) {
	for config, want := range map[string]string{
		`{"capabilities":{"bandwidth":true}}`:              "[]",
		`{"capabilities":{"bandwidth":true},"latencyx":1}`: "[latencyx: unknown key is ignored; did you mean latency?]",
		`{}`: `[capabilities: without {"bandwidth": true} the runtime passes no bandwidth, so no pod is limited]`,
	} {
		if got := fmt.Sprint(Findings([]byte(config))); got != want {
			t.Errorf("%s: %s, want %s", config, got, want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/attachment"
)

const trapped = "does not have the effect that it suggests"

// addLog runs ADD for a container and returns what the plugin logs.
func (l testLab) addLog(id string, keys ...any) string {
	l.Helper()
	var log strings.Builder
	l.Stderr = &log
	l.OK(l.Call("ADD", id, keys...))
	return log.String()
}

// If portmap's capability is missing or misspelt in the configuration, the runtime passes no ports, as for a pod without any. The first ADD
// logs that, later ones do not, and a changed configuration is logged again.
func TestMissingCapabilityIsLoggedOnce(t *testing.T) {
	for name, c := range map[string]struct {
		keys []any
		says string
	}{
		"none":                     {nil, `key=capabilities finding="without {\"portMappings\": true} the runtime passes no portMappings, so no hostPort is forwarded"`},
		"misspelt":                 {[]any{"capabilities", object{"portMapping": true}}, `key=capabilities.portMapping`},
		"off":                      {[]any{"capabilities", object{"portMappings": false}}, "no hostPort is forwarded"},
		"a pod that wants nothing": {[]any{"capabilities", object{"portMappings": true}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			t.Cleanup(func() { _ = attachment.RemoveNote(attachment.OfNode, "logged-found-portmap-traps") })
			keys := append([]any{"name", "traps", "runtimeConfig", nil}, c.keys...)
			first, next := l.addLog("first", keys...), l.addLog("next", keys...)
			if strings.Contains(first, trapped) != (c.says != "") || !strings.Contains(first, c.says) {
				t.Errorf("want %q in:\n%s", c.says, first)
			}
			if strings.Contains(next, trapped) {
				t.Errorf("the next ADD says it again:\n%s", next)
			}
			if c.says != "" {
				l.addLog("mended", append(keys, "capabilities", object{"portMappings": true})...)
				if again := l.addLog("again", keys...); !strings.Contains(again, c.says) {
					t.Errorf("a mistake that comes back is not said:\n%s", again)
				}
			}
			if changed := l.addLog("changed", append(keys, "capabilities", object{"portMaping": true})...); c.says != "" &&
				!strings.Contains(changed, "capabilities.portMaping") {
				t.Errorf("another mistake is not said:\n%s", changed)
			}
		})
	}
}

func TestFindingsOfConfiguration(t *testing.T) {
	for config, want := range map[string]string{
		`{"capabilities":{"portMappings":true}}`:              "[]",
		`{"capabilities":{"portMappings":true},"backendx":1}`: "[backendx: unknown key is ignored; did you mean backend?]",
		`{}`: `[capabilities: without {"portMappings": true} the runtime passes no portMappings, so no hostPort is forwarded]`,
	} {
		if got := fmt.Sprint(Findings([]byte(config))); got != want {
			t.Errorf("%s: %s, want %s", config, got, want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"strings"
	"testing"
)

const traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

func TestParseTraceparent(t *testing.T) {
	const id, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	for value, want := range map[string]bool{
		traceparent:                        true,
		"00-" + id + "-" + span + "-00":    true,
		"cc-" + id + "-" + span + "-01-x":  true, // a later version
		"00-" + id + "-" + span + "-01-x":  false,
		"ff-" + id + "-" + span + "-01":    false,
		"":                                 false,
		id:                                 false,
		"00-" + id + "-" + span:            false,
		"00-" + id[1:] + "-" + span + "-1": false,
		"00-" + strings.ToUpper(id) + "-" + span + "-01":         false,
		"00-" + strings.Repeat("0", 32) + "-" + span + "-01":     false,
		"00-" + id + "-" + strings.Repeat("0", 16) + "-01":       false,
		"00-" + id + "-" + span + "-zz":                          false,
		"00-" + strings.Repeat("\n", 32) + "-" + span + "-01":    false,
		"00-" + id + "-" + span + "-01 level=ERROR msg=\"fake\"": false,
	} {
		got, ok := parseTraceparent(value)
		if ok != want || ok && (got != traceContext{id, span}) {
			t.Errorf("%q: %v, %+v", value, ok, got)
		}
	}
}

// Log lines contain the trace context of the environment variable or, if that is invalid, of CNI_ARGS.
func TestTraceInLog(t *testing.T) {
	other := strings.Replace(traceparent, "4bf9", "0af7", 1)
	for _, c := range []struct{ name, env, args, want string }{
		{"environment", traceparent, "", "trace_id=4bf92f3577b34da6a3ce929d0e0e4736 span_id=00f067aa0ba902b7"},
		{"CNI_ARGS", "", "TRACEPARENT=" + traceparent, "trace_id=4bf92f3577b34da6a3ce929d0e0e4736 span_id=00f067aa0ba902b7"},
		{"both", other, "TRACEPARENT=" + traceparent, "trace_id=0af72f3577b34da6a3ce929d0e0e4736"},
		{"wrong in the environment", "00-1-2-3", "TRACEPARENT=" + traceparent, "trace_id=4bf92f3577b34da6a3ce929d0e0e4736"},
		{"none", "", "", ""},
		{"wrong", "00-1-2-3", "", ""},
	} {
		// CHECK refuses unknown arguments.
		e := newEnv("CHECK").with("CNI_NETNS", "/run/netns/x", "TRACEPARENT", c.env, "CNI_ARGS", c.args)
		o := run(warningPlugin(), e, `{"cniVersion":"1.1.0","name":"net","prevResult":{"cniVersion":"1.1.0"}}`)
		if o.exit != 0 || !strings.Contains(o.stderr, "msg=hello") || !strings.Contains(o.stderr, c.want) ||
			c.want == "" && strings.Contains(o.stderr, "trace_id") {
			t.Errorf("%s: exit %d, %s%s", c.name, o.exit, o.stdout, o.stderr)
		}
	}
}

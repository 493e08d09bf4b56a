// SPDX-License-Identifier: Apache-2.0

package plugin

import "strings"

// traceArg is the environment variable, set by libcni, with the traceparent (trace ID and span ID) of the container runtime. CNI_ARGS may
// contain a key with the same name and meaning.
const traceArg = "TRACEPARENT"

// traceContext identifies the trace and the span of the runtime, to which the plugins' log lines belong, since plugins create no spans.
type traceContext struct{ id, span string }

// readTrace returns the trace context, or the zero value without one. It ignores an invalid value, as W3C Trace Context requires.
func readTrace(getenv func(string) string, args map[string]string) traceContext {
	for _, value := range []string{getenv(traceArg), args[traceArg]} {
		if t, ok := parseTraceparent(value); ok {
			return t
		}
	}
	return traceContext{}
}

// parseTraceparent parses a traceparent (W3C Trace Context, section 3.2), which is version-traceid-parentid-flags in lower-case hexadecimal
// digits. Later versions may add parts.
func parseTraceparent(value string) (t traceContext, ok bool) {
	parts := strings.Split(value, "-")
	if len(parts) < 4 || len(parts) > 4 && parts[0] == "00" {
		return t, false
	}
	for i, length := range []int{2, 32, 16, 2} {
		if len(parts[i]) != length || strings.Trim(parts[i], "0123456789abcdef") != "" {
			return t, false
		}
	}
	if parts[0] == "ff" || strings.Trim(parts[1], "0") == "" || strings.Trim(parts[2], "0") == "" {
		return t, false
	}
	return traceContext{id: parts[1], span: parts[2]}, true
}

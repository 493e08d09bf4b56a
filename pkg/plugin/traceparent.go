// SPDX-License-Identifier: Apache-2.0

package plugin

import "strings"

// traceArg is the environment variable, and the key of CNI_ARGS, with the traceparent of the runtime's span. libcni sets the variable.
const traceArg = "TRACEPARENT"

// traceContext is the runtime's position in a trace. The plugins make no spans of their own: their log lines belong to the runtime's span.
type traceContext struct{ id, span string }

// readTrace returns the trace context, or the zero value if there is none. As W3C Trace Context demands, a wrong value is ignored.
func readTrace(getenv func(string) string, args map[string]string) traceContext {
	for _, value := range []string{getenv(traceArg), args[traceArg]} {
		if t, ok := parseTraceparent(value); ok {
			return t
		}
	}
	return traceContext{}
}

// parseTraceparent parses version-traceid-parentid-flags in lower-case hexadecimal digits (W3C Trace Context, section 3.2). A later version
// may have more parts.
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

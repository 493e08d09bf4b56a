// SPDX-License-Identifier: Apache-2.0

package plugin

import "strings"

// Plain makes a text fit for a terminal: a pod's name may hold anything. What is no printable ASCII becomes '?', and the rest beyond most
// characters is cut.
func Plain(text string, most int) string {
	var b strings.Builder
	for _, r := range text {
		if b.Len() == most {
			break
		}
		if r < ' ' || r > '~' {
			r = '?'
		}
		b.WriteRune(r)
	}
	return b.String()
}

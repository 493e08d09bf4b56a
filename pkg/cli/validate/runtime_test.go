// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"fmt"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/yamlfile"
)

// TestRefusedByRuntimes: what libcni does not load is an error, whatever the plugins accept.
func TestRefusedByRuntimes(t *testing.T) {
	const loopback = `{"type":"loopback"}`
	for text, want := range map[string]string{
		`{"cniVersion":"1.1.0","name":"a","plugins":[%s]}`:                                 "",
		`{"cniVersion":"1.1.0","name":"a","disableCheck":"x","plugins":[%s]}`:              `disableCheck: error: "x": runtimes refuse`,
		`{"cniVersion":"1.1.0","name":"a","disableGC":3,"plugins":[%s]}`:                   "disableGC",
		`{"cniVersion":"1.1.0","name":"a","type":"loopback"}` + "%.0s":                     `plugins: error: runtimes refuse the configuration: it has no name, or no list`,
		`{"cniVersion":"1.1.0","name":"a","plugins":[{"type":"x","capabilities":[1]},%s]}`: "capabilities",
		"\ufeff" + `{"cniVersion":"1.1.0","name":"a","plugins":[%s]}`:                      "byte order mark",
		`cniVersion: 1.1.0 # %s`: "no JSON",
		`[%s]`:                   "no network configuration",
	} {
		var errs []string
		for _, p := range Files([]yamlfile.File{{Name: "a.conflist", Data: fmt.Appendf(nil, text, loopback)}}, Node{}) {
			if p.Error {
				errs = append(errs, p.String())
			}
		}
		if want == "" && len(errs) > 0 || want != "" && (len(errs) != 1 || !strings.Contains(errs[0], want)) {
			t.Errorf("%s: %q, want %q", text, errs, want)
		}
	}
}

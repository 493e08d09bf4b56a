// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"path/filepath"
	"strings"
	"testing"
)

// TestCodes compares the code of each finding, and for configuration errors also file, line and column.
func TestCodes(t *testing.T) {
	for name, c := range map[string]struct {
		check        string
		spoil        func(*lab)
		code         string
		line, column int
	}{
		"misspelt key": {"conflist-keys", func(l *lab) {
			l.write("net.d/10-podlace.conflist", strings.Replace(ours, "isGateway", "isGatway", 1))
		}, "unknown-key", 2, 42},
		"bad value": {"conflist-keys", func(l *lab) {
			l.write("net.d/10-podlace.conflist", strings.Replace(ours, "true", `true, "mtu": "x"`, 1))
		}, "6", 2, 61},
		"STATUS":       {"status", func(l *lab) { l.write("bin/bridge", statusFails) }, "50", 0, 0},
		"own code":     {"binaries", func(l *lab) { l.plugin("bridge", "plugin v1.9.1") }, "plugin-foreign", 0, 0},
		"by its check": {"networkmanager", func(l *lab) { l.run("NetworkManager") }, "networkmanager", 0, 0},
	} {
		l := newLab(t)
		c.spoil(&l)
		found, err := Examine(l.Options, c.check)
		if err != nil || len(found) != 1 {
			t.Errorf("%s: %+v, %v", name, found, err)
			continue
		}
		f, file := found[0], ""
		if c.line > 0 {
			file = filepath.Join(l.ConfDir, "10-podlace.conflist")
		}
		if string(f.Code) != c.code || f.Line != c.line || f.Column != c.column || f.File != file {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

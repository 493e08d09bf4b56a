// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/cli/doctor"
)

// TestFolders checks that commands use the folders of the container runtime, as doctor does, unless flags select other folders.
func TestFolders(t *testing.T) {
	for _, cmd := range Command().Commands() {
		for _, name := range []string{"conf-dir", "bin-dir"} {
			if f := cmd.Flags().Lookup(name); f != nil && (f.DefValue != "" || cmd.PreRun == nil) {
				t.Errorf("%s --%s does not use the folder of the runtime: %q", cmd.Name(), name, f.DefValue)
			}
		}
	}
	both := doctor.Options{ConfDir: "/a", BinDir: "/b"}
	if got := doctor.Folders(both); got != both {
		t.Errorf("%+v", got)
	}
	if got := doctor.Folders(doctor.Options{BinDir: "/b"}); got.ConfDir == "" || got.BinDir != "/b" {
		t.Errorf("%+v", got)
	}
}

// TestFirstConflist checks that the error of 'podlace canary' contains the name of a configuration that cannot be used.
func TestFirstConflist(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "net.d")
	file := filepath.Join(dir, "10-a.conflist")
	for _, c := range []struct{ text, first, err string }{
		{"", "", "podlace doctor prints the command that installs a configuration"},
		{"{", "", "no network configuration in " + dir + " can be used: " + file + ": unexpected end of JSON input"},
		{`{"name": "a", "plugins": [{"type": "bridge"}]}`, file, ""},
	} {
		if c.text != "" {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		first, err := firstConflist(dir)
		if first != c.first || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%q: %q, %v", c.text, first, err)
		}
	}
}

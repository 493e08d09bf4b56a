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
	asked := 0
	runtime := func() doctor.Options {
		asked++
		return doctor.Options{ConfDir: "/conf", BinDir: "/bin"}
	}
	for _, c := range []struct {
		conf, bin, wantConf, wantBin string
		asked                        int
	}{{"", "", "/conf", "/bin", 1}, {"/a", "", "/a", "/bin", 1}, {"", "/b", "/conf", "/b", 1}, {"/a", "/b", "/a", "/b", 0}} {
		conf, bin := c.conf, c.bin
		asked = 0
		fillFolders(runtime, &conf, &bin)
		if conf != c.wantConf || bin != c.wantBin || asked != c.asked {
			t.Errorf("%q and %q became %q and %q, asked %d times", c.conf, c.bin, conf, bin, asked)
		}
	}
	for _, cmd := range newRoot().Commands() {
		for _, name := range []string{"conf-dir", "bin-dir"} {
			if f := cmd.Flags().Lookup(name); f != nil && (f.DefValue != "" || cmd.PreRun == nil && cmd.Name() != "doctor") {
				t.Errorf("%s --%s does not use the folder of the runtime: %q", cmd.Name(), name, f.DefValue)
			}
		}
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

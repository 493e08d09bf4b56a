// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"

	"github.com/podlace/podlace/pkg/doctor"
)

// TestFolders checks that commands use the folders of the container runtime, as doctor does, unless flags name others.
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

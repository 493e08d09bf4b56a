// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/cli/doctor"
)

// TestFolders: commands use the runtime's folders, as doctor does, unless flags select others.
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

// TestFirstConflist: the error of 'podlace canary' names an unusable configuration.
func TestFirstConflist(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "net.d")
	file := filepath.Join(dir, "10-a.conflist")
	for _, c := range []struct{ text, first, err string }{
		{"", "", "podlace doctor prints the command that installs a configuration"},
		{"{", "", "no network configuration in " + dir + " can be used: " + file + ": error parsing configuration list: unexpected end of JSON input"},
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
		first, _, err := firstConflist(dir)
		if first != c.first || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%q: %q, %v", c.text, first, err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "00-b.conflist"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if first, unusable, err := firstConflist(dir); first != file || len(unusable) != 1 || !strings.Contains(unusable[0], "00-b.conflist") {
		t.Errorf("%q, %q, %v", first, unusable, err)
	}
}

// TestLoopbackIsNoAddress: the canary does not take an address of the node for its pod's.
func TestLoopbackIsNoAddress(t *testing.T) {
	own, pod := net.IPNet{IP: net.IPv4(127, 0, 0, 1)}, net.IPNet{IP: net.IPv4(10, 0, 0, 2)}
	if got := addressesOf(&types100.Result{IPs: []*types100.IPConfig{{Address: own}, {Address: pod}}}); len(got) != 1 || !got[0].IsPrivate() {
		t.Errorf("got %v", got)
	}
}

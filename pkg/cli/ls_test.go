// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/cli/reconcile"
)

const hostile = "shop/\x1b[2Jweb\n0\té"

var notPlain = regexp.MustCompile(`[^\n -~]`)

// TestTextIsPlain: a pod's name can neither control the terminal nor add lines.
func TestTextIsPlain(t *testing.T) {
	removed := true
	list := []*reconcile.Attachment{{Network: "n", Pod: hostile, ContainerID: hostile, IfName: hostile, Dead: hostile, Removed: &removed},
		{Network: "n", Pod: strings.Repeat("x", 200), ContainerID: "c"}}
	c := collection{Attachments: list, Dead: 2, Errors: []string{hostile}, Notes: []string{hostile}}
	var stdout, stderr bytes.Buffer
	c.print(&stdout, &stderr)
	for _, out := range []string{stdout.String(), stderr.String()} {
		if notPlain.MatchString(out) {
			t.Errorf("raw bytes in %q", out)
		}
	}
	if out := stdout.String(); strings.Count(out, "\n") != 4 || !strings.Contains(out, "shop/?[2Jweb?0?? ") ||
		strings.Contains(out, strings.Repeat("x", 129)) {
		t.Errorf("%q", out)
	}
	if out := stderr.String(); strings.Count(out, "\n") != 2 || !strings.Contains(out, "podlace: shop/?[2Jweb; 0??\n") {
		t.Errorf("%q", out)
	}
}

// TestNoFolder: the error about a missing folder names the flag that selects another.
func TestNoFolder(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: these commands are root's")
	}
	missing := filepath.Join(t.TempDir(), "none")
	for _, name := range []string{"gc", "ls", "rollback"} {
		status, stdout, stderr := run(name, "--conf-dir", missing) // without --yes: a defect must not change the node
		if status != exitFailed || stdout != "" || !strings.Contains(stderr, missing+": no such file") ||
			!strings.Contains(stderr, "--conf-dir") || !strings.Contains(stderr, "/var/lib/rancher/k3s/agent/etc/cni/net.d") {
			t.Errorf("%s: status %d, %q, %q", name, status, stdout, stderr)
		}
	}
}

// TestUnknownNetwork: ls fails for a network in no configuration and no record, instead of printing an empty list.
func TestUnknownNetwork(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: these commands are root's")
	}
	dir := t.TempDir()
	const known = `{"cniVersion":"1.0.0","name":"known","plugins":[{"type":"bridge"}]}`
	if err := os.WriteFile(filepath.Join(dir, "10-known.conflist"), []byte(known), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"gc", "ls"} {
		status, stdout, stderr := run(name, "--conf-dir", dir, "--network", "knwon")
		if status != exitFailed || stdout != "" || !strings.Contains(stderr, "knwon") || !strings.Contains(stderr, dir) {
			t.Errorf("%s of an unknown network: status %d, %q, %q", name, status, stdout, stderr)
		}
	}
	if status, stdout, stderr := run("ls", "--conf-dir", dir, "--network", "known"); status != exitOK || stderr != "" ||
		strings.Count(stdout, "\n") != 1 {
		t.Errorf("a network without pods: status %d, %q, %q", status, stdout, stderr)
	}
}

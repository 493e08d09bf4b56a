// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness"
)

// TestFaultLate: the runtime kills the main plugin at its deadline, while another project's IPAM plugin is about to allocate an address.
func TestFaultLate(t *testing.T) {
	for title, script := range harness.InOrder(map[string]string{
		"child":      `sleep 0.6; : >"$0.lease"`,
		"grandchild": `(sleep 0.6; : >"$0.lease") & wait`,
		"daemon":     `setsid sh -c 'sleep 0.6; : >"$0.lease"' "$0" & wait`,
	}) {
		t.Run("F-03 late "+title+" of a killed ADD", func(t *testing.T) {
			s := newStub(t)
			y := harness.Tally{}
			for range harness.Some(1, 20) {
				y.Points++
				s.killEarly(t, &y, script)
				s.f.Oracle.Clean(t, "DEL after the late "+title)
				s.setScript(t, "ADD", "echo '"+stubResult+"'")
				s.call("ADD").Run(t).OK(t)
				s.call("DEL").Run(t).OK(t)
				y.Next++
			}
			y.Report(t)
		})
	}
}

// killEarly kills bridge as soon as its IPAM plugin runs, and sends DEL, after which no process may allocate an address.
func (s *stubIPAM) killEarly(t *testing.T, y *harness.Tally, script string) {
	t.Helper()
	started, lease := filepath.Join(s.dir, "started"), s.path()+".lease"
	_ = os.Remove(started)
	s.setScript(t, "ADD", ": >"+started+"; "+script)
	s.setScript(t, "DEL", `rm -f "$0.lease"`)
	add := s.call("ADD")
	cmd := exec.Command(filepath.Join(harness.BinDir(), "bridge"))
	cmd.Stdin = bytes.NewReader(add.Stdin)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	for k, v := range add.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	harness.Await(t, "the IPAM plugin to start", func() bool { _, err := os.Stat(started); return err == nil })
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	s.call("DEL").Run(t).OK(t)
	// Wait longer than the IPAM plugin's child sleeps. There is no event to wait for if nothing is allocated.
	for end := time.Now().Add(900 * time.Millisecond); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(lease); err == nil {
			y.Leaks++
			t.Fatal("an address was allocated after DEL")
		}
	}
}

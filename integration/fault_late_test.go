// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// TestFaultLate: the runtime loses patience and kills the plugin, while the IPAM plugin of somebody else is about to allocate.
func TestFaultLate(t *testing.T) {
	for title, script := range inOrder(map[string]string{
		"child":      `sleep 0.6; : >"$0.lease"`,
		"grandchild": `(sleep 0.6; : >"$0.lease") & wait`,
		"daemon":     `setsid sh -c 'sleep 0.6; : >"$0.lease"' "$0" & wait`,
	}) {
		t.Run("F-03 late "+title+" of a killed ADD", func(t *testing.T) {
			s := newStub(t)
			y := tally{}
			for range some(1, 20) {
				y.points++
				s.late(t, &y, script)
				s.f.oracle.clean(t, "DEL after the late "+title)
				s.on(t, "ADD", "echo '"+stubResult+"'")
				s.call("ADD").run(t).ok(t)
				s.call("DEL").run(t).ok(t)
				y.next++
			}
			y.report(t)
		})
	}
}

// late kills the bridge as soon as its IPAM plugin runs, and calls DEL. Once that has come back, nobody may allocate any more.
func (s *stub) late(t *testing.T, y *tally, script string) {
	t.Helper()
	started, lease := filepath.Join(s.dir, "started"), s.path()+".lease"
	_ = os.Remove(started)
	s.on(t, "ADD", ": >"+started+"; "+script)
	s.on(t, "DEL", `rm -f "$0.lease"`)
	add := s.call("ADD")
	cmd := exec.Command(filepath.Join(binDir(), "bridge"))
	cmd.Stdin = bytes.NewReader(add.stdin)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	for k, v := range add.env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	await(t, "the IPAM plugin to start", func() bool { _, err := os.Stat(started); return err == nil })
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	s.call("DEL").run(t).ok(t)
	// Longer than the child sleeps: no event tells that nothing happens.
	for end := time.Now().Add(900 * time.Millisecond); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(lease); err == nil {
			y.leaks++
			t.Fatal("an address was allocated after DEL")
		}
	}
}

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
		"child":      `sleep 0.6; exec "$HOST_LOCAL"`,
		"grandchild": `sh -c 'sleep 0.6; exec "$HOST_LOCAL"' <&0 & wait`,
		"daemon":     `setsid sh -c 'sleep 0.6; exec "$HOST_LOCAL"' <&0 & wait`,
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
	started, ended := filepath.Join(s.dir, "started"), filepath.Join(s.dir, "ended")
	_, _ = os.Remove(started), os.Remove(ended)
	// host-local keeps its leases under the name that the configuration gives; the stub turns itself into it.
	s.on(t, "ADD", `export HOST_LOCAL=`+binDir()+`/host-local; : >`+started+`; exec <"$0.ADD.stdin"; `+script)
	s.on(t, "DEL", `exec `+binDir()+`/host-local <"$0.DEL.stdin"`)
	conf := s.conf().with("ipam", object{"type": "stub", "ranges": []any{[]any{map[string]any{"subnet": "10.70.1.0/24"}}}})
	add := s.call("ADD").config(conf)
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
	s.call("DEL").config(conf).run(t).ok(t)
	before := leaseFiles("table")
	// Longer than the child sleeps: no event tells that nothing happens.
	for end := time.Now().Add(900 * time.Millisecond); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if now := leaseFiles("table"); len(now) != len(before) {
			y.leaks++
			t.Fatalf("leases %q after DEL, %q later", before, now)
		}
	}
	s.on(t, "DEL", "")
}

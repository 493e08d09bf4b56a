// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/daemon/probes"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/store"
)

// TestSocketsComeBack checks that the daemon creates its sockets again after a program has deleted or replaced them.
func TestSocketsComeBack(t *testing.T) {
	l := newLab(t, twoPFs(t), twoPools)
	l.awaitDevices("example.com/one", vf00, vf01)
	http := strings.TrimPrefix(l.HTTP, probes.UnixPrefix)
	answers := func() {
		t.Helper()
		l.await("/readyz", "ok")
		var err error
		for until := time.Now().Add(maxWait); time.Now().Before(until); time.Sleep(5 * time.Millisecond) {
			if _, err = poddevices.Ask(l.Socket, time.Now().Add(maxWait), poddevices.Question{}); err == nil {
				return
			}
		}
		t.Fatal(err)
	}
	answers()
	for _, path := range []string{http, l.Socket} {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	answers()
	first := [2]probes.SocketID{}
	for i, path := range []string{http, l.Socket} {
		first[i], _ = probes.SocketAt(path)
	}
	second := &testLab{T: t, daemonOptions: l.daemonOptions, kubelet: l.kubelet, reload: l.reload, log: &logBuffer{}}
	stop := second.start()
	for i, path := range []string{http, l.Socket} {
		for until := time.Now().Add(maxWait); ; time.Sleep(time.Millisecond) {
			if id, ok := probes.SocketAt(path); ok && !id.Same(first[i]) {
				break
			} else if time.Now().After(until) {
				t.Fatalf("%s is not the second instance's", path)
			}
		}
	}
	answers()
	stop()
	answers()
}

// TestNoSocketThere checks that the daemon does not remove a file that is not a socket.
func TestNoSocketThere(t *testing.T) {
	for what, make := range map[string]func(path string) error{
		"file":   func(path string) error { return os.WriteFile(path, []byte("{}"), 0o600) },
		"folder": func(path string) error { return os.Mkdir(path, 0o700) },
		"link":   func(path string) error { return os.Symlink("elsewhere", path) },
	} {
		for _, of := range []string{"socket", "http"} {
			l := prepareLab(t, twoPFs(t), twoPools)
			path := filepath.Join(t.TempDir(), "s")
			if err := make(path); err != nil {
				t.Fatal(err)
			}
			before, _ := os.Lstat(path)
			if of == "http" {
				l.HTTP = probes.UnixPrefix + path
			} else {
				l.Socket = path
			}
			err := runDaemon(t.Context(), l.daemonOptions, nil, quiet())
			after, gone := os.Lstat(path)
			if err == nil || !strings.Contains(err.Error(), "something else is there") || gone != nil || !os.SameFile(before, after) {
				t.Errorf("%s, %s: %v, %v", of, what, err, gone)
			}
		}
	}
}

// TestPipe checks that a configuration that is not a regular file is refused at the start and on reload, and that a FIFO does not delay
// answers.
func TestPipe(t *testing.T) {
	l := newLab(t, twoPFs(t), twoPools)
	l.awaitDevices("example.com/one", vf00, vf01)
	for _, err := range []error{os.Remove(l.ConfigFile), unix.Mkfifo(l.ConfigFile, 0o600)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	l.awaitLog("the current one remains in use", "want a regular file")
	l.await("/metrics", "podlace_sriov_config_refused 1")
	for range 2 {
		before := strings.Count(l.log.String(), "want a regular file")
		l.hup() // questions are still answered
		for until := time.Now().Add(maxWait); strings.Count(l.log.String(), "want a regular file") == before; time.Sleep(time.Millisecond) {
			if time.Now().After(until) {
				t.Fatal("SIGHUP says nothing")
			}
		}
	}
	if _, err := store.ReadFile(l.ConfigFile); err == nil {
		t.Error("a pipe is read")
	}
	l.configure(twoPools)
	l.await("/metrics", "podlace_sriov_config_refused 0")
}

// TestReady checks the readiness probe in three cases: a ready instance, an instance that is not ready, and no running instance.
func TestReady(t *testing.T) {
	l := prepareLab(t, twoPFs(t), twoPools)
	if err := probes.AskReady(t.Context(), l.HTTP); err == nil {
		t.Error("ready without an instance")
	}
	stop := l.start()
	l.await("/readyz", "the kubelet does not watch example.com/one, example.com/two")
	if err := probes.AskReady(t.Context(), l.HTTP); err == nil || !strings.Contains(err.Error(), "does not watch example.com/one") {
		t.Errorf("got %v", err)
	}
	l.kubelet.start()
	l.await("/readyz", "ok")
	if err := probes.AskReady(t.Context(), l.HTTP); err != nil {
		t.Error(err)
	}
	stop()
	if _, err := os.Lstat(l.Socket); !os.IsNotExist(err) {
		t.Errorf("the socket of an instance that ended: %v", err)
	}
}

// TestAbsent checks that the kubelet's absence is logged once, and not while it restarts.
func TestAbsent(t *testing.T) {
	log := &logBuffer{}
	r := &registrar{endpoint: &endpoint{log: logTo(log)}}
	for i, step := range []struct {
		absent bool
		since  time.Duration
		lines  int
	}{{true, 0, 0}, {true, absentFor / 2, 0}, {true, 2 * absentFor, 1}, {true, 3 * absentFor, 1}, {false, 0, 1}, {true, 0, 1},
		{true, 2 * absentFor, 2}} {
		if step.since > 0 {
			r.absent = time.Now().Add(-step.since)
		}
		r.logAbsent(step.absent, "the kubelet is absent", "/x")
		if got := strings.Count(log.String(), "the kubelet is absent"); got != step.lines {
			t.Errorf("step %d: %d lines, want %d", i, got, step.lines)
		}
	}
}

// TestUnwritable checks that pods still get their devices through the kubelet if the daemon can write no files.
func TestUnwritable(t *testing.T) {
	l := prepareLab(t, twoPFs(t), `{"cdi": "field", "resourceList": [{"resourceName": "one", "selectors": {"pfNames": ["ens0f0"], "needVhostNet": true}}]}`)
	file := filepath.Join(filepath.Dir(l.ConfigFile), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	l.CDIDir, l.InfoDir = filepath.Join(file, "cdi"), filepath.Join(file, "info")
	l.kubelet.start()
	l.start()
	p := l.awaitDevices("example.com/one", vf00, vf01)
	got, err := p.client.Allocate(context.Background(), allocating(vf00))
	if err != nil {
		t.Fatal(err)
	}
	if c := got.GetContainerResponses()[0]; len(c.GetCdiDevices()) != 0 || len(c.GetDevices()) != 2 {
		t.Errorf("got %v", c)
	}
	l.awaitLog("could not write CDI specifications")
}

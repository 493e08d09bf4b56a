// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/daemon/probes"
)

// daemonEnv makes the test program run as the daemon.
const daemonEnv = "PODLACE_TEST_DAEMON"

func TestMain(m *testing.M) {
	if os.Getenv(daemonEnv) != "" {
		os.Exit(Main(os.Args[1:], os.Stderr))
	}
	kerneltest.Main(m)
}

// startProcess runs the test's daemon in a process of its own until the test ends.
func (l *testLab) startProcess() (pid int) {
	l.Helper()
	cmd := exec.Command("/proc/self/exe", "--config-file", l.ConfigFile, "--resource-prefix", l.Prefix, "--node-name", l.Host,
		"--sysfs", l.Sysfs, "--dev", l.Dev, "--device-plugin-dir", l.Kubelet.Plugins, "--kubelet-dir", filepath.Dir(l.Pods),
		"--registration", "classic",
		"--device-info-dir", l.InfoDir, "--cdi-dir", l.CDIDir, "--socket", l.Socket, "--http", l.HTTP, "--poll", "1s")
	cmd.Env, cmd.Stderr = append(os.Environ(), daemonEnv+"=1"), l.log
	if err := cmd.Start(); err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() {
		if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil {
			l.Errorf("%v\n%s", err, l.log)
		}
	})
	return cmd.Process.Pid
}

// peakMemory returns the peak memory of a process in KiB since the peak was last reset.
func peakMemory(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")))
			if err != nil {
				t.Fatal(err)
			}
			return kib
		}
	}
	t.Fatalf("no VmHWM in %s", text)
	return 0
}

// probeHealth requests /healthz once over a new connection.
func probeHealth(socket string) error {
	conn, err := net.DialTimeout("unix", socket, maxWait)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(maxWait)); err != nil {
		return err
	}
	if _, err := io.WriteString(conn, "GET /healthz HTTP/1.1\r\nHost: node\r\n\r\n"); err != nil {
		return err
	}
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return errors.New(answer.Status)
	}
	return nil
}

// TestHalfOpen opens 10,000 connections without completing a request. They may cost a few MiB at most, and the daemon must answer
// /healthz and the kubelet meanwhile and afterwards.
func TestHalfOpen(t *testing.T) {
	const most = 10_000
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil || limit.Max < most+1000 {
		t.Skipf("SKIPPED: this user may open %d files, %v", limit.Max, err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: limit.Max, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	l := prepareLab(t, twoPFs(t), twoPools)
	l.kubelet.start()
	pid := l.startProcess()
	kubelet := l.awaitDevices("example.com/one", vf00, vf01)
	socket := strings.TrimPrefix(l.HTTP, probes.UnixPrefix)
	served := func(when string) {
		t.Helper()
		if err := probeHealth(socket); err != nil {
			t.Errorf("/healthz %s: %v", when, err)
		}
		if _, err := kubelet.client.Allocate(t.Context(), allocating(vf00)); err != nil {
			t.Errorf("Allocate %s: %v", when, err)
		}
		if _, err := kubelet.client.GetDevicePluginOptions(t.Context(), &pluginapi.Empty{}); err != nil {
			t.Errorf("options %s: %v", when, err)
		}
	}
	served("before")
	before := peakMemory(t, pid)
	var open []net.Conn
	defer func() {
		for _, conn := range open {
			conn.Close()
		}
	}()
	for i := range most {
		conn, err := net.DialTimeout("unix", socket, maxWait)
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		open = append(open, conn)
		if i%2 == 0 {
			_, _ = io.WriteString(conn, "GET /healthz HTTP/1.1\r\nX: y") // the server may have closed the connection
		}
		if i%2500 == 0 {
			served(fmt.Sprintf("with %d connections", i))
		}
	}
	served("with all connections")
	grown := peakMemory(t, pid) - before
	bound := 24 << 10
	if info, ok := debug.ReadBuildInfo(); ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		bound *= 4 // the race detector shadows all memory
	}
	if grown > bound {
		t.Errorf("%d connections took %d KiB", most, grown)
	}
	t.Logf("%d connections took %d KiB more than %d", most, grown, before)
}

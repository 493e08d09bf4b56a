// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness/node"
	"github.com/podlace/podlace/integration/pcitest"
)

// daemon is a process of sriov-device-plugin. Its sockets are not in t.TempDir, whose paths are too long for a unix socket.
type daemon struct {
	t                 *testing.T
	bin, dir, sysfs   string
	kubeconfig        string
	flags             []string // additional flags
	cmd               *exec.Cmd
	log, http, socket string
}

const claimRecords = "/run/podlace-sriov/claims"

func newDaemon(t *testing.T, sysfs, config string) *daemon {
	t.Helper()
	bin, err := node.Plugins()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	d := &daemon{t: t, bin: bin, dir: dir, sysfs: sysfs, kubeconfig: daemonKubeconfig(), log: filepath.Join(dir, "daemon.log"),
		http: "/run/node/daemon.sock", socket: "/run/podlace-sriov/sriov.sock"}
	d.configure(config)
	t.Cleanup(func() { d.end(syscall.SIGTERM) })
	return d
}

func (d *daemon) configFile() string { return filepath.Join(d.dir, "config.json") }

// configure writes the daemon's configuration, which a running daemon reloads.
func (d *daemon) configure(config string) {
	d.t.Helper()
	file := d.configFile()
	if err := os.WriteFile(file+".new", []byte(config), 0o600); err != nil {
		d.t.Fatal(err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		d.t.Fatal(err)
	}
}

// run starts the daemon as root with only the capability CAP_NET_ADMIN, like conf/sriov-device-plugin.service.
func (d *daemon) run() {
	d.t.Helper()
	args := append([]string{"--no-new-privs", "--bounding-set=-all,+net_admin", "--inh-caps=-all", filepath.Join(d.bin, "sriov-device-plugin"),
		"--config-file", d.configFile(), "--sysfs", d.sysfs, "--poll", "1s", "--node-name", nodeName, "--kubeconfig", d.kubeconfig,
		"--http", "unix:" + d.http, "--socket", d.socket}, d.flags...)
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		d.t.Fatal(err)
	}
	defer log.Close()
	d.cmd = exec.Command("setpriv", args...)
	d.cmd.Stdout, d.cmd.Stderr = log, log
	if err := d.cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
}

// end stops the daemon with a signal and waits for its exit. It is a no-op if no daemon runs.
func (d *daemon) end(signal syscall.Signal) {
	if d.cmd == nil {
		return
	}
	_ = d.cmd.Process.Signal(signal)
	hard := time.AfterFunc(20*time.Second, func() { _ = d.cmd.Process.Kill() })
	_ = d.cmd.Wait()
	if !hard.Stop() {
		d.t.Errorf("the daemon was killed: it did not end by %v within 20 s", signal)
	}
	d.cmd = nil
}

func (d *daemon) restart(signal syscall.Signal) {
	d.t.Helper()
	d.end(signal)
	d.run()
	d.ready()
}

func (d *daemon) get(path string) (string, error) {
	client := http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", d.http)
		}}}
	r, err := client.Get("http://daemon" + path)
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err == nil && r.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, r.Status, body)
	}
	return string(body), err
}

// ready waits until the kubelet has registered the daemon.
func (d *daemon) ready() {
	d.t.Helper()
	within(d.t, "the daemon is ready", func() error {
		_, err := d.get("/readyz")
		return err
	})
}

// metric returns the value of a metric, given by its name with labels, or "" if it is unknown.
func (d *daemon) metric(name string) string {
	d.t.Helper()
	text, err := d.get("/metrics")
	if err != nil {
		d.t.Fatal(err)
	}
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// says returns how many lines of the daemon's log contain the given text.
func (d *daemon) says(text string) (n int) {
	data, _ := os.ReadFile(d.log)
	for line := range strings.Lines(string(data)) {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

// tail returns the last lines of a log that contain one of the words.
func tail(log string, lines int, words ...string) string {
	data, _ := os.ReadFile(log)
	var found []string
	for line := range strings.Lines(string(data)) {
		for _, w := range words {
			if strings.Contains(line, w) {
				found = append(found, line)
				break
			}
		}
	}
	return strings.Join(found[max(0, len(found)-lines):], "")
}

func (d *daemon) podlace(args ...string) (string, error) {
	args = append([]string{"sriov"}, append(args, "--config-file", d.configFile())...)
	out, err := exec.Command(filepath.Join(d.bin, "podlace"), args...).CombinedOutput()
	return string(out), err
}

func (d *daemon) carrier(pf, ifname string, on bool) {
	d.t.Helper()
	pcitest.Set(d.t, d.sysfs, pf, "net/"+ifname+"/carrier", map[bool]string{true: "1", false: "0"}[on])
}

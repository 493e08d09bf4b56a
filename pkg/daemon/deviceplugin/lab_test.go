// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/podlace/podlace/integration/pcitest"
)

// testLab is a daemon with a fake kubelet and a fake sysfs.
type testLab struct {
	*testing.T
	daemonOptions
	kubelet *fakeKubelet
	reload  chan os.Signal
	log     *logBuffer
}

// logBuffer is a log that a test can read while the daemon writes.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func logTo(l *logBuffer) *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func newLab(t *testing.T, sysfs, config string) *testLab {
	t.Helper()
	l := prepareLab(t, sysfs, config)
	l.kubelet.start()
	l.start()
	return l
}

func prepareLab(t *testing.T, sysfs, config string) *testLab {
	k := newFakeKubelet(t)
	root := filepath.Dir(k.dir)
	l := &testLab{T: t, kubelet: k, reload: make(chan os.Signal), log: &logBuffer{},
		daemonOptions: daemonOptions{ConfigFile: filepath.Join(root, "etc", "config.json"), Prefix: "example.com",
			Host: "node-a", Sysfs: sysfs, Dev: filepath.Join(root, "dev"), Kubelet: k.folder(), Pods: filepath.Join(root, "pod-resources"),
			InfoDir: filepath.Join(root, "devinfo"),
			CDIDir:  filepath.Join(root, "cdi"), Socket: filepath.Join(root, "run", "sriov.sock"), HTTP: "unix:" + filepath.Join(root, "http.sock"),
			Poll: 20 * time.Millisecond, NewDriver: newDriver, Root: root, Claims: filepath.Join(root, "run", "claims")}}
	for _, d := range []string{filepath.Dir(l.ConfigFile), l.Pods, filepath.Join(l.Dev, "net")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(l.Dev, "vhost-net"), "")
	write(t, filepath.Join(l.Dev, "net", "tun"), "")
	l.configure(config)
	return l
}

func (l *testLab) configure(config string) {
	l.Helper()
	if err := os.WriteFile(l.ConfigFile+".new", []byte(config), 0o644); err != nil {
		l.Fatal(err)
	}
	if err := os.Rename(l.ConfigFile+".new", l.ConfigFile); err != nil {
		l.Fatal(err)
	}
}

// start runs a daemon until the test ends or stop is called.
func (l *testLab) start() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- runDaemon(ctx, l.daemonOptions, l.reload, logTo(l.log))
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			l.Error(err)
		}
	})
	l.Cleanup(stop)
	return stop
}

// awaitDevices waits until a resource offers exactly the given devices. "!" after an ID means that the device is unhealthy.
func (l *testLab) awaitDevices(resource string, want ...string) *registeredPlugin {
	l.Helper()
	return l.kubelet.await(resource, strings.Join(want, " "), func(p *registeredPlugin) bool {
		var got []string
		for id, d := range p.devices {
			if d.GetHealth() != pluginapi.Healthy {
				id += "!"
			}
			got = append(got, id)
		}
		slices.Sort(got)
		return slices.Equal(got, want) && !p.ended
	})
}

func (l *testLab) awaitLog(parts ...string) {
	l.Helper()
	for until := time.Now().Add(maxWait); time.Now().Before(until); time.Sleep(5 * time.Millisecond) {
		for line := range strings.Lines(l.log.String()) {
			if !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(line, p) }) {
				return
			}
		}
	}
	l.Fatalf("no line with %q in\n%s", parts, l.log)
}

func (l *testLab) hup() { l.reload <- syscall.SIGHUP }

const twoPools = `{"resourceList": [
  {"resourceName": "one", "selectors": {"pfNames": ["ens0f0"]}},
  {"resourceName": "two", "selectors": {"pfNames": ["ens1f0"]}}]}`

// The fake machine has a PF with two VFs on each of two NUMA nodes.
const (
	pf0, vf00, vf01 = "0000:11:00.0", "0000:11:02.0", "0000:11:02.1"
	pf1, vf10, vf11 = "0000:15:00.0", "0000:15:02.0", "0000:15:02.1"
)

func twoPFs(t *testing.T) string {
	return pcitest.Generate(t, pcitest.Machine{Nodes: 2, PFs: 1, VFs: 2})
}

// get sends a request to the daemon and returns the body of the answer.
func (l *testLab) get(path string) (string, error) {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", strings.TrimPrefix(l.HTTP, "unix:"))
		}}}
	answer, err := client.Get("http://node" + path)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	return string(body), err
}

// await repeats a request until the answer contains all parts.
func (l *testLab) await(path string, parts ...string) {
	l.Helper()
	text := ""
	for until := time.Now().Add(maxWait); time.Now().Before(until); time.Sleep(5 * time.Millisecond) {
		body, err := l.get(path)
		if err != nil {
			continue
		}
		text = body
		if !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(text, p) }) {
			return
		}
	}
	l.Fatalf("%s: want %q, got\n%s", path, parts, text)
}

func allocating(ids ...string) *pluginapi.AllocateRequest {
	return &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}}}
}

// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	kubeletRoot = "/var/lib/kubelet"
	manifests   = "/run/node/manifests"
	podLogs     = "/run/node/podlogs"
	healthURL   = "http://127.0.0.1:20248/healthz"
	podsURL     = "http://127.0.0.1:20255/pods"
)

// kubeletSettings is the kubelet's configuration. The Memory Manager requires that reservedMemory is the sum of systemReserved (462 Mi) and
// the eviction threshold (50 Mi). CPU 0 of each NUMA node is the system's.
const kubeletSettings = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
staticPodPath: ` + manifests + `
podLogsDir: ` + podLogs + `
fileCheckFrequency: 200ms
syncFrequency: 10s
address: 127.0.0.1
port: 20250
readOnlyPort: 20255
healthzBindAddress: 127.0.0.1
healthzPort: 20248
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix://%s
cgroupDriver: cgroupfs
enforceNodeAllocatable: [pods]
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
makeIPTablesUtilChains: false
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 50Mi, nodefs.available: 0%%, nodefs.inodesFree: 0%%, imagefs.available: 0%%, imagefs.inodesFree: 0%%}
registerNode: false
shutdownGracePeriod: 0s
cpuManagerPolicy: static
reservedSystemCPUs: "0,8"
memoryManagerPolicy: Static
systemReserved: {memory: 462Mi}
reservedMemory:
- {numaNode: 0, limits: {memory: 256Mi}}
- {numaNode: 1, limits: {memory: 256Mi}}
topologyManagerPolicy: %s
topologyManagerScope: pod
logging: {format: text, verbosity: 2}
`

// runtimeSocket returns the socket of the runtime that scripts/node.sh runs.
func runtimeSocket() string {
	if os.Getenv("CRIO") != "" {
		return "/run/crio/crio.sock"
	}
	return "/run/containerd/containerd.sock"
}

// testProcess is a program of the node that writes its output to a file.
type testProcess struct {
	t   *testing.T
	log string
	cmd *exec.Cmd
}

// startProgram runs the program until the test ends.
func (p *testProcess) startProgram(program string, args ...string) {
	p.t.Helper()
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	p.cmd = cmd
}

// endProgram ends the program with a signal and waits for its exit.
func (p *testProcess) endProgram(signal syscall.Signal) {
	if p.cmd == nil {
		return
	}
	_ = p.cmd.Process.Signal(signal)
	hard := time.AfterFunc(20*time.Second, func() { _ = p.cmd.Process.Kill() })
	_ = p.cmd.Wait()
	if !hard.Stop() {
		p.t.Errorf("%s: killed, it did not end by %v within 20 s", p.cmd.Path, signal)
	}
	p.cmd = nil
}

// tailLog returns the last lines of the log that contain one of the given words.
func (p *testProcess) tailLog(words ...string) string {
	data, _ := os.ReadFile(p.log)
	var lines []string
	for line := range strings.Lines(string(data)) {
		for _, w := range words {
			if strings.Contains(line, w) {
				lines = append(lines, line)
				break
			}
		}
	}
	return strings.Join(lines[max(0, len(lines)-15):], "")
}

// testKubelet is the kubelet of the node, with a policy of the Topology Manager.
type testKubelet struct {
	testProcess
	config  string
	dropIns string // a folder, "" for none
}

// newKubelet prepares a kubelet and removes the state of earlier kubelets.
func newKubelet(t *testing.T, policy string) *testKubelet {
	t.Helper()
	dir := t.TempDir()
	k := &testKubelet{testProcess{t: t, log: filepath.Join(dir, "kubelet.log")}, filepath.Join(dir, "kubelet.yaml"), ""}
	if err := os.WriteFile(k.config, fmt.Appendf(nil, kubeletSettings, runtimeSocket(), policy), 0o600); err != nil {
		t.Fatal(err)
	}
	// A kubelet bind-mounts its root folder, and leaves this mount behind when it ends.
	_ = syscall.Unmount(kubeletRoot, syscall.MNT_DETACH)
	if err := os.RemoveAll(manifests); err != nil {
		t.Fatal(err)
	}
	entries, err := filepath.Glob(kubeletRoot + "/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(e); err != nil {
			t.Fatal(err)
		}
	}
	for _, made := range []string{manifests, kubeletRoot + "/device-plugins", kubeletRoot + "/plugins_registry",
		kubeletRoot + "/pod-resources"} {
		if err := os.MkdirAll(made, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("kubelet:\n%s", k.tailLog("evice", "E1", "dmission"))
		}
		k.endProgram(syscall.SIGTERM)
	})
	return k
}

// hasEnded reports whether the program has ended by itself.
func (p *testProcess) hasEnded() bool {
	var info unix.Siginfo
	err := unix.Waitid(unix.P_PID, p.cmd.Process.Pid, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	return err == nil && info.Signo != 0
}

// runKubelet starts the kubelet and waits until it is healthy. It ends if containerd does not serve the CRI yet, and is then started again,
// as by systemd.
func (k *testKubelet) runKubelet() {
	k.t.Helper()
	start := func() {
		k.startProgram(kubeletPath(), "--config", k.config, "--config-dir", k.dropIns, "--hostname-override", "node", "--node-ip", "192.0.2.1")
	}
	start()
	checkWithin(k.t, 30*time.Second, "the kubelet is healthy", func() error {
		if k.hasEnded() {
			k.endProgram(syscall.SIGTERM)
			start()
		}
		r, err := http.Get(healthURL)
		if err != nil {
			return err
		}
		defer r.Body.Close()
		if r.StatusCode != http.StatusOK {
			return fmt.Errorf("healthz: %s", r.Status)
		}
		return nil
	})
}

// podStatus is a pod's status as the kubelet reports it.
type podStatus struct {
	Metadata struct{ Name, UID string }
	Status   struct {
		Phase, Reason, Message, PodIP string
		PodIPs                        []struct{ IP string }
		ContainerStatuses             []struct {
			ContainerID              string
			Ready                    bool
			RestartCount             int
			AllocatedResourcesStatus []struct {
				Name      string
				Resources []struct{ ResourceID, Health string }
			}
		}
	}
}

// podsByName returns all pods of the kubelet, by the names in their manifests.
func (k *testKubelet) podsByName() (map[string]podStatus, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, podsURL, nil)
	if err != nil {
		return nil, err
	}
	r, err := http.DefaultClient.Do(q)
	if err != nil {
		return nil, err
	}
	defer r.Body.Close()
	var list struct{ Items []podStatus }
	if err := json.NewDecoder(r.Body).Decode(&list); err != nil {
		return nil, fmt.Errorf("%s: %w", podsURL, err)
	}
	pods := map[string]podStatus{}
	for _, p := range list.Items {
		pods[strings.TrimSuffix(p.Metadata.Name, "-node")] = p
	}
	return pods, nil
}

// checkWithin fails the test unless the check succeeds before the time limit.
func checkWithin(t *testing.T, limit time.Duration, what string, check func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if err = check(); err == nil {
			return
		}
	}
	t.Fatalf("not within %s: %s: %v", limit, what, err)
}

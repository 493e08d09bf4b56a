// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness/node"
)

// testLab consists of a running kubelet and a running device plugin.
type testLab struct {
	t *testing.T
	*testKubelet
	*devicePlugin
	started int
}

// newLab starts the kubelet and then the device plugin, which registers through the kubelet's device-plugins folder.
func newLab(t *testing.T, policy string) *testLab {
	t.Helper()
	node.Skip(t)
	l := prepareLab(t, policy, "classic")
	l.runKubelet()
	l.runDaemon()
	l.awaitReady(20 * time.Second)
	return l
}

// prepareLab prepares a kubelet and a device plugin without starting them. Pods end before the kubelet at the end of the test.
func prepareLab(t *testing.T, policy, registration string) *testLab {
	t.Helper()
	l := &testLab{t: t, testKubelet: newKubelet(t, policy)}
	l.devicePlugin = newPlugin(t, generateCards(t), registration)
	t.Cleanup(l.removeAll)
	return l
}

// podResources contains the requests and limits of a pod's only container.
type podResources map[string]string

func vfs(n int) podResources { return podResources{resource: fmt.Sprint(n)} }

// guaranteedLimits returns requests for exclusive CPUs and for VFs.
func guaranteedLimits(cpus, vfs int) podResources {
	return podResources{"cpu": fmt.Sprint(cpus), "memory": "64Mi", resource: fmt.Sprint(vfs)}
}

// putManifest writes a pod's manifest into the kubelet's folder. Its annotation is unique, because the kubelet takes an identical manifest
// for the same pod with the same devices.
func (l *testLab) putManifest(name string, limits podResources) {
	l.t.Helper()
	l.started++
	manifest := map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": name, "namespace": "shop",
			"annotations": map[string]string{"podlace.test/run": fmt.Sprint(time.Now().UnixNano())}},
		"spec": map[string]any{
			"terminationGracePeriodSeconds": 1,
			"containers": []any{map[string]any{
				"name": "app", "image": node.Image, "imagePullPolicy": "Never",
				"command": []string{"/bin/sh", "-c",
					`env; trap "exit 0" TERM; mkdir /www; hostname > /www/index.html; httpd -f -p 8080 -h /www & wait`},
				"resources": map[string]any{"limits": limits},
			}},
		},
	}
	data, err := json.Marshal(manifest)
	if err != nil {
		l.t.Fatal(err)
	}
	hidden := filepath.Join(manifests, "."+name) // the kubelet ignores hidden files
	if err := os.WriteFile(hidden, data, 0o600); err != nil {
		l.t.Fatal(err)
	}
	if err := os.Rename(hidden, filepath.Join(manifests, name+".json")); err != nil {
		l.t.Fatal(err)
	}
}

// runPod runs a pod and returns its VFs. The container's environment variable and the kubelet must list the same VFs.
func (l *testLab) runPod(name string, limits podResources) []string {
	l.t.Helper()
	l.putManifest(name, limits)
	checkWithin(l.t, 30*time.Second, "pod "+name+" runs", func() error { return l.runs(name) })
	ids := l.devicesOf(name)
	if fmt.Sprint(len(ids)) != limits[resource] {
		l.t.Fatalf("pod %s has %v: want %s", name, ids, limits[resource])
	}
	if got, want := l.variablesOf(name)[variable], strings.Join(ids, ","); got != want {
		l.t.Errorf("pod %s: %s is %q: want %q, as the kubelet says", name, variable, got, want)
	}
	l.checkServes(name)
	return ids
}

// checkServes fails the test unless the pod's web server is reachable at the pod's address.
func (l *testLab) checkServes(name string) {
	l.t.Helper()
	ip := l.statusOf(name).Status.PodIP
	checkWithin(l.t, 5*time.Second, "pod "+name+" at "+ip+" answers", func() error {
		r, err := http.Get("http://" + net.JoinHostPort(ip, "8080") + "/")
		if err != nil {
			return err
		}
		defer r.Body.Close()
		text, err := io.ReadAll(r.Body)
		if got, want := strings.TrimSpace(string(text)), name+"-node"; err != nil || got != want {
			return fmt.Errorf("it says %q, %v: want %q", got, err, want)
		}
		return nil
	})
}

func (l *testLab) runs(name string) error {
	pods, err := l.podsByName()
	if err != nil {
		return err
	}
	p := pods[name]
	if p.Status.Phase == "Running" && len(p.Status.ContainerStatuses) == 1 && p.Status.ContainerStatuses[0].Ready {
		return nil
	}
	return fmt.Errorf("phase %q %s: %s", p.Status.Phase, p.Status.Reason, p.Status.Message)
}

// runRefused starts a pod that the kubelet must refuse, and returns the kubelet's reason.
func (l *testLab) runRefused(name string, limits podResources) (reason, message string) {
	l.t.Helper()
	l.putManifest(name, limits)
	checkWithin(l.t, 20*time.Second, "pod "+name+" is refused", func() error {
		pods, err := l.podsByName()
		if p := pods[name]; err == nil && p.Status.Phase == "Failed" {
			reason, message = p.Status.Reason, p.Status.Message
			return nil
		}
		return fmt.Errorf("phase %q, %v", pods[name].Status.Phase, err)
	})
	l.removePods(name)
	return reason, message
}

// statusOf returns the kubelet's status of a running pod.
func (l *testLab) statusOf(name string) podStatus {
	l.t.Helper()
	pods, err := l.podsByName()
	if err != nil {
		l.t.Fatal(err)
	}
	p, ok := pods[name]
	if !ok || len(p.Status.ContainerStatuses) != 1 {
		l.t.Fatalf("the kubelet does not know pod %s, or not yet its container: %+v", name, p)
	}
	return p
}

// devicesOf returns the VFs of a pod as the kubelet reports them, sorted.
func (l *testLab) devicesOf(name string) (ids []string) {
	l.t.Helper()
	for _, h := range heldDevices(l.t, resource) {
		if h.Pod == name+"-node" {
			ids = append(ids, h.ID)
		}
	}
	slices.Sort(ids)
	return ids
}

// variablesOf returns the environment of a container from the container's log.
func (l *testLab) variablesOf(name string) map[string]string {
	l.t.Helper()
	log := fmt.Sprintf("%s/shop_%s-node_%s/app/0.log", podLogs, name, l.statusOf(name).Metadata.UID)
	variables := map[string]string{}
	checkWithin(l.t, 5*time.Second, "the container writes its variables", func() error {
		data, err := os.ReadFile(log)
		for line := range strings.Lines(string(data)) {
			if parts := strings.SplitN(strings.TrimSpace(line), " ", 4); len(parts) == 4 {
				key, value, _ := strings.Cut(parts[3], "=")
				variables[key] = value
			}
		}
		if err == nil && variables["PATH"] == "" {
			err = fmt.Errorf("%s: %q", log, data)
		}
		return err
	})
	return variables
}

// removePods ends pods and waits until they have left the kubelet's list and have no sandbox.
func (l *testLab) removePods(names ...string) {
	l.t.Helper()
	for _, name := range names {
		if err := os.Remove(filepath.Join(manifests, name+".json")); err != nil {
			l.t.Error(err)
		}
	}
	checkWithin(l.t, 40*time.Second, fmt.Sprintf("pods %v end", names), func() error {
		pods, err := l.podsByName()
		if err != nil {
			return err
		}
		for _, name := range names {
			if p, ok := pods[name]; ok {
				return fmt.Errorf("pod %s is %s", name, p.Status.Phase)
			}
			if s, ok := sandboxOf(name); ok { // the kubelet forgets a pod before its sandbox ends, and another test may use the same pod name
				return fmt.Errorf("pod %s has the sandbox %+v", name, s)
			}
			if path := recordOf(name); path != "" { // the runtime stops the sandbox before DEL ends, and a test's end would kill DEL
				return fmt.Errorf("pod %s has the record %s", name, path)
			}
		}
		return nil
	})
}

// recordOf returns the path of a plugin's record of a pod, or "" if no plugin has a record.
func recordOf(pod string) string {
	paths, _ := filepath.Glob("/run/podlace/*/*")
	for _, path := range paths {
		if data, err := os.ReadFile(path); err == nil && strings.Contains(string(data), `"shop/`+pod+`-node"`) {
			return path
		}
	}
	return ""
}

// removeAll ends all pods.
func (l *testLab) removeAll() {
	files, _ := filepath.Glob(manifests + "/*.json")
	var names []string
	for _, f := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(f), ".json"))
	}
	if len(names) > 0 && l.testKubelet.cmd != nil {
		l.removePods(names...)
	}
}

// sameNUMA returns the NUMA node of the devices, which must be on one.
func (l *testLab) sameNUMA(pod string, ids []string) int {
	l.t.Helper()
	for _, id := range ids {
		if l.numaOf(id) != l.numaOf(ids[0]) {
			l.t.Errorf("pod %s has %v, which are on several NUMA nodes", pod, ids)
			break
		}
	}
	return l.numaOf(ids[0])
}

// cpusOf returns the exclusive CPUs of a pod's container.
func (l *testLab) cpusOf(name string) []int64 {
	l.t.Helper()
	for _, h := range heldDevices(l.t, resource) {
		if h.Pod == name+"-node" {
			return h.CPUs
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/integration/harness/node"
	"github.com/podlace/podlace/integration/pcitest"
)

const (
	slow     = "example.com/slow"
	twoPools = `{"resourceList": [
		{"resourceName": "fast", "resourcePrefix": "example.com", "selectors": {"pfNames": ["ens0f0", "ens1f0"]}},
		{"resourceName": "slow", "resourcePrefix": "example.com", "selectors": {"pfNames": ["ens0f1", "ens1f1"]}}]}`
	conflist = "10-podlace-sriov.conflist"
)

// vfLab is a lab whose pods get VFs through the shipped conflist. Veths take the place of the VFs' interfaces.
type vfLab struct {
	*testLab
	before map[string]linkInfo // interfaces of the VFs, by PCI address
	ids    []string            // addresses of all VFs, sorted
}

// newVFLab starts the kubelet and the device plugin with a copy of the shipped conflist that has another resource at the start of the list,
// and more keys for sriov.
func newVFLab(t *testing.T, keys ...string) *vfLab {
	t.Helper()
	shipped, err := conf.Conflist(conflist)
	if err != nil {
		t.Fatal(err)
	}
	two := strings.Join(append([]string{fmt.Sprintf(`[%q, %q]`, slow, resource)}, keys...), ", ")
	return startVFLab(t, twoPools, strings.Replace(string(shipped), `["`+resource+`"]`, two, 1))
}

func startVFLab(t *testing.T, pools, network string) *vfLab {
	t.Helper()
	node.Skip(t)
	sysfs := pcitest.Generate(t, pcitest.Machine{Nodes: numaNodes, PFs: 2, VFs: 4, CPUs: cpusEach})
	l := &vfLab{testLab: &testLab{t: t, testKubelet: newKubelet(t, "none"), devicePlugin: newPlugin(t, sysfs, "classic")}}
	l.dropIns = t.TempDir()
	const patient = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ncrashLoopBackOff: {maxContainerRestartPeriod: 1s}\n"
	if err := errors.Join(os.WriteFile(l.devicePlugin.config(), []byte(pools), 0o600),
		os.WriteFile(filepath.Join(l.dropIns, "50-restarts.conf"), []byte(patient), 0o600)); err != nil {
		t.Fatal(err)
	}
	l.ids = addInterfaces(t, sysfs)
	l.before = linksOnNode(t, sysfs)
	if got := slices.Sorted(maps.Keys(l.before)); !slices.Equal(got, l.ids) {
		t.Fatalf("interfaces of %v: want %v", got, l.ids)
	}
	showCards(t, sysfs)
	useConflist(t, network)
	t.Cleanup(l.removeAll)
	l.runKubelet()
	l.runDaemon()
	l.awaitReady(20 * time.Second)
	return l
}

// containerSpec describes one container of a pod and its limits.
type containerSpec struct {
	name   string
	limits podResources
	first  bool // an init container
}

// startMark begins the first line that each container prints, and the container's interfaces follow.
const startMark = "interfaces when it starts:"

// putPod writes a new pod's manifest into the kubelet's folder.
func (l *vfLab) putPod(name string, containers ...containerSpec) {
	l.t.Helper()
	list := map[bool][]any{}
	for _, c := range containers {
		command := `echo "` + startMark + `" $(ls /sys/class/net)`
		if !c.first {
			command += `; trap "exit 0" TERM; while :; do sleep 3600 & wait $!; done`
		}
		list[c.first] = append(list[c.first], map[string]any{"name": c.name, "image": node.Image, "imagePullPolicy": "Never",
			"resources": map[string]any{"limits": c.limits}, "command": []string{"/bin/sh", "-c", command}})
	}
	l.write(name, map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": name, "namespace": "shop",
			"annotations": map[string]string{"podlace.test/run": fmt.Sprint(time.Now().UnixNano())}},
		"spec": map[string]any{"terminationGracePeriodSeconds": 1, "initContainers": list[true], "containers": list[false]},
	})
}

func (l *vfLab) write(name string, manifest any) {
	l.t.Helper()
	data, err := json.Marshal(manifest)
	hidden := filepath.Join(manifests, "."+name) // the kubelet ignores hidden files
	if err := errors.Join(err, os.WriteFile(hidden, data, 0o600), os.Rename(hidden, filepath.Join(manifests, name+".json"))); err != nil {
		l.t.Fatal(err)
	}
}

// awaitRunning waits until the pod runs with a new UID, and returns this UID.
func (l *vfLab) awaitRunning(name, former string) (uid string) {
	l.t.Helper()
	checkWithin(l.t, 60*time.Second, "pod "+name+" runs", func() error {
		pods, err := l.podsByName()
		if err != nil {
			return err
		}
		p := pods[name]
		if p.Status.Phase != "Running" || p.Metadata.UID == former || len(p.Status.ContainerStatuses) == 0 {
			return fmt.Errorf("%s is %q %s: %s", p.Metadata.UID, p.Status.Phase, p.Status.Reason, p.Status.Message)
		}
		for _, c := range p.Status.ContainerStatuses {
			if !c.Ready {
				return fmt.Errorf("a container of %s is not ready", p.Metadata.UID)
			}
		}
		uid = p.Metadata.UID
		return nil
	})
	return uid
}

// checkAttached fails the test unless the pod has exactly these VFs as net1, net2 and so on beside eth0.
func (l *vfLab) checkAttached(name string, ids ...string) {
	l.t.Helper()
	s, ok := sandboxOf(name)
	all, err := linksIn(s.netns)
	if err != nil || !ok {
		l.t.Fatalf("pod %s: sandbox %+v: %v", name, s, err)
	}
	got, want := map[string]string{}, map[string]string{}
	for _, i := range all {
		if i.Name != "lo" && i.Name != "eth0" {
			got[i.Name] = i.MAC
		}
	}
	for n, id := range ids {
		want[fmt.Sprint("net", n+1)] = l.before[id].MAC
	}
	if !maps.Equal(got, want) || len(all) != len(ids)+2 {
		l.t.Errorf("pod %s, sandbox %+v, has %+v: want eth0, lo and %v, which are %v", name, s, all, want, ids)
	}
	if written := journaledVFs(l.t); slices.ContainsFunc(ids, func(id string) bool { return !slices.Contains(written, id) }) {
		l.t.Errorf("journals of %v: want also %v", written, ids)
	}
}

// checkVFs fails the test unless the pod has exactly the given VFs now and had them at each start of its containers.
func (l *vfLab) checkVFs(name, uid string, ids ...string) {
	l.t.Helper()
	l.checkAttached(name, ids...)
	names := []string{"eth0", "lo"} // sorted like the output of ls
	for n := range ids {
		names = append(names, fmt.Sprint("net", n+1))
	}
	containers, err := filepath.Glob(fmt.Sprintf("%s/shop_%s-node_%s/*", podLogs, name, uid))
	if err != nil || len(containers) == 0 {
		l.t.Errorf("logs of pod %s: %v, %v", name, containers, err)
	}
	for _, c := range containers {
		l.checkStarts(c, strings.Join(names, " "))
	}
}

// checkStarts fails the test unless a container listed the wanted interfaces at each start. It ignores an earlier start without output,
// because the kubelet removes old logs and may kill a container before its first line.
func (l *vfLab) checkStarts(logs, want string) {
	l.t.Helper()
	checkWithin(l.t, 10*time.Second, "a container of "+logs+" begins", func() error {
		files, err := filepath.Glob(logs + "/*.log")
		slices.SortFunc(files, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) }) // 9.log, 10.log
		said := false
		for _, f := range files {
			data, _ := os.ReadFile(f)
			_, text, ok := strings.Cut(string(data), startMark+" ")
			got, _, isWhole := strings.Cut(text, "\n")
			if said = ok && isWhole; said && got != want {
				l.t.Fatalf("%s: the container started with %q: want %q", f, got, want)
			}
		}
		if !said {
			return fmt.Errorf("%v: the last container has printed nothing yet: %v", files, err)
		}
		return nil
	})
}

// allocatedVFs returns a container's VFs of a resource as the kubelet reports them, sorted.
func (l *vfLab) allocatedVFs(pod, container, of string) (ids []string) {
	l.t.Helper()
	for _, h := range heldDevices(l.t, of) {
		if h.Pod == pod+"-node" && h.Container == container {
			ids = append(ids, h.ID)
		}
	}
	slices.Sort(ids)
	return ids
}

// checkReturned waits for the end of all sandboxes. All VFs must be on the node with their original settings.
func (l *vfLab) checkReturned() {
	l.t.Helper()
	checkWithin(l.t, 30*time.Second, "no VF has a journal", func() error { // the kubelet forgets pods before their sandboxes end
		if left := journaledVFs(l.t); len(left) > 0 {
			return fmt.Errorf("left are %v", left)
		}
		return nil
	})
	now := linksOnNode(l.t, l.sysfs)
	for _, id := range l.ids {
		if was, is := fmt.Sprintf("%+v", l.before[id]), fmt.Sprintf("%+v", now[id]); was != is {
			l.t.Errorf("VF %s is %s: want %s", id, is, was)
		}
	}
	if records, _ := filepath.Glob("/run/podlace/*/sriov-*"); len(records) > 0 {
		l.t.Errorf("records are left: %v", records)
	}
}

// endSandbox kills a pod's sandbox. The kubelet then creates a new sandbox.
func (l *vfLab) endSandbox(pod string) (former podSandbox) {
	l.t.Helper()
	former, ok := sandboxOf(pod)
	if !ok {
		l.t.Fatalf("pod %s has no sandbox", pod)
	}
	pods, err := l.podsByName()
	if err != nil {
		l.t.Fatal(err)
	}
	for _, c := range pods[pod].Status.ContainerStatuses {
		former.containers = append(former.containers, c.ContainerID)
	}
	if former.containers == nil {
		l.t.Fatalf("the kubelet knows no container of pod %s", pod)
	}
	if err := syscall.Kill(former.pid, syscall.SIGKILL); err != nil {
		l.t.Fatal(err)
	}
	return former
}

// awaitNewSandbox waits for a new sandbox of a pod.
func (l *vfLab) awaitNewSandbox(pod string, former podSandbox) {
	l.t.Helper()
	checkWithin(l.t, 60*time.Second, "pod "+pod+" has a new sandbox", func() error {
		if s, ok := sandboxOf(pod); !ok || s.id == former.id {
			return fmt.Errorf("it has %+v", s)
		}
		return nil
	})
}

// awaitRestarted waits until the pod's containers run in a new sandbox. Restart counts do not tell, because they start at 0 again once the
// kubelet has removed the old container.
func (l *vfLab) awaitRestarted(pod string, former podSandbox) {
	l.t.Helper()
	l.awaitNewSandbox(pod, former)
	checkWithin(l.t, 60*time.Second, "pod "+pod+" runs again", func() error {
		pods, err := l.podsByName()
		if err != nil {
			return err
		}
		containers := pods[pod].Status.ContainerStatuses
		if len(containers) == 0 || len(containers) != len(former.containers) {
			return fmt.Errorf("the pod has the containers %+v, and had %v", containers, former.containers)
		}
		for _, c := range containers {
			if !c.Ready || slices.Contains(former.containers, c.ContainerID) {
				return fmt.Errorf("%+v", c)
			}
		}
		return nil
	})
}

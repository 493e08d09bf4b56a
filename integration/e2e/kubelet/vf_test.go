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
	"github.com/podlace/podlace/pkg/pci/pcitest"
)

const (
	slow     = "example.com/slow"
	twoPools = `{"resourceList": [
		{"resourceName": "fast", "resourcePrefix": "example.com", "selectors": {"pfNames": ["ens0f0", "ens1f0"]}},
		{"resourceName": "slow", "resourcePrefix": "example.com", "selectors": {"pfNames": ["ens0f1", "ens1f1"]}}]}`
	conflist = "10-podlace-sriov.conflist"
)

// vfLab is a lab whose pods get their VFs from the shipped conflist. Veths stand in for the VFs' interfaces.
type vfLab struct {
	*lab
	before map[string]iface // interfaces of the VFs, by PCI address
	ids    []string         // addresses of all VFs, sorted
}

// newVFLab starts kubelet and device plugin. The conflist has an additional resource before the shipped one, and additional keys of
// sriov.
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
	l := &vfLab{lab: &lab{t: t, kubelet: newKubelet(t, "none"), plugin: newPlugin(t, sysfs, "classic")}}
	l.dropIns = t.TempDir()
	const patient = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ncrashLoopBackOff: {maxContainerRestartPeriod: 1s}\n"
	if err := errors.Join(os.WriteFile(l.plugin.config(), []byte(pools), 0o600),
		os.WriteFile(filepath.Join(l.dropIns, "50-restarts.conf"), []byte(patient), 0o600)); err != nil {
		t.Fatal(err)
	}
	l.ids = addInterfaces(t, sysfs)
	l.before = atHome(t, sysfs)
	if got := slices.Sorted(maps.Keys(l.before)); !slices.Equal(got, l.ids) {
		t.Fatalf("interfaces of %v: want %v", got, l.ids)
	}
	showCards(t, sysfs)
	useConflist(t, network)
	t.Cleanup(l.removeAll)
	l.kubelet.run()
	l.plugin.run()
	l.ready(20 * time.Second)
	return l
}

// container is one container of a pod, and its requests.
type container struct {
	name   string
	limits resources
	first  bool // an init container
}

// started is the first output of each container: its interfaces.
const started = "interfaces when it starts:"

// put writes a new pod's manifest into the kubelet's folder.
func (l *vfLab) put(name string, containers ...container) {
	l.t.Helper()
	list := map[bool][]any{}
	for _, c := range containers {
		command := `echo "` + started + `" $(ls /sys/class/net)`
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
	hidden := filepath.Join(manifests, "."+name) // the kubelet leaves it alone
	if err := errors.Join(err, os.WriteFile(hidden, data, 0o600), os.Rename(hidden, filepath.Join(manifests, name+".json"))); err != nil {
		l.t.Fatal(err)
	}
}

// up waits until a pod with a UID other than the given one runs, and returns its UID.
func (l *vfLab) up(name, former string) (uid string) {
	l.t.Helper()
	within(l.t, 60*time.Second, "pod "+name+" runs", func() error {
		pods, err := l.pods()
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

// attached fails the test unless the pod has exactly these VFs in its namespace, as net1, net2 and so on beside eth0.
func (l *vfLab) attached(name string, ids ...string) {
	l.t.Helper()
	s, ok := sandboxOf(name)
	all, err := interfaces(s.netns)
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
	if written := journals(l.t); slices.ContainsFunc(ids, func(id string) bool { return !slices.Contains(written, id) }) {
		l.t.Errorf("journals of %v: want also %v", written, ids)
	}
}

// has fails the test unless the pod has exactly these VFs, and had them at each start of its containers.
func (l *vfLab) has(name, uid string, ids ...string) {
	l.t.Helper()
	l.attached(name, ids...)
	names := []string{"eth0", "lo"} // sorted like the output of ls
	for n := range ids {
		names = append(names, fmt.Sprint("net", n+1))
	}
	containers, err := filepath.Glob(fmt.Sprintf("%s/shop_%s-node_%s/*", podLogs, name, uid))
	if err != nil || len(containers) == 0 {
		l.t.Errorf("logs of pod %s: %v, %v", name, containers, err)
	}
	for _, c := range containers {
		l.saw(c, strings.Join(names, " "))
	}
}

// saw fails the test unless a container found these interfaces at each start. Starts without output are ignored except for the last,
// because the kubelet removes logs and kills containers that have just started.
func (l *vfLab) saw(logs, want string) {
	l.t.Helper()
	within(l.t, 10*time.Second, "a container of "+logs+" begins", func() error {
		files, err := filepath.Glob(logs + "/*.log")
		slices.SortFunc(files, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) }) // 9.log, 10.log
		said := false
		for _, f := range files {
			data, _ := os.ReadFile(f)
			_, text, ok := strings.Cut(string(data), started+" ")
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

// allocated returns a container's VFs of a resource in the kubelet's answer, sorted.
func (l *vfLab) allocated(pod, container, of string) (ids []string) {
	l.t.Helper()
	for _, h := range holders(l.t, of) {
		if h.Pod == pod+"-node" && h.Container == container {
			ids = append(ids, h.ID)
		}
	}
	slices.Sort(ids)
	return ids
}

// allHome waits for the end of all sandboxes, and fails the test unless all VFs are on the node with their original settings.
func (l *vfLab) allHome() {
	l.t.Helper()
	within(l.t, 30*time.Second, "no VF has a journal", func() error { // the kubelet forgets pods before their sandboxes end
		if left := journals(l.t); len(left) > 0 {
			return fmt.Errorf("left are %v", left)
		}
		return nil
	})
	now := atHome(l.t, l.sysfs)
	for _, id := range l.ids {
		if was, is := fmt.Sprintf("%+v", l.before[id]), fmt.Sprintf("%+v", now[id]); was != is {
			l.t.Errorf("VF %s is %s: want %s", id, is, was)
		}
	}
	if records, _ := filepath.Glob("/run/podlace/*/sriov-*"); len(records) > 0 {
		l.t.Errorf("records are left: %v", records)
	}
}

// endSandbox kills a pod's sandbox, which the kubelet recreates.
func (l *vfLab) endSandbox(pod string) (former sandbox) {
	l.t.Helper()
	former, ok := sandboxOf(pod)
	if !ok {
		l.t.Fatalf("pod %s has no sandbox", pod)
	}
	pods, err := l.pods()
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
func (l *vfLab) awaitNewSandbox(pod string, former sandbox) {
	l.t.Helper()
	within(l.t, 60*time.Second, "pod "+pod+" has a new sandbox", func() error {
		if s, ok := sandboxOf(pod); !ok || s.id == former.id {
			return fmt.Errorf("it has %+v", s)
		}
		return nil
	})
}

// again waits until the pod's containers run in a new sandbox. It ignores restart counts, because the kubelet counts from 0 again
// after it has removed the old container.
func (l *vfLab) again(pod string, former sandbox) {
	l.t.Helper()
	l.awaitNewSandbox(pod, former)
	within(l.t, 60*time.Second, "pod "+pod+" runs again", func() error {
		pods, err := l.pods()
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

// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

type sandbox struct {
	id, netns string
	pid       int
}

// sandboxOf finds a pod's sandbox in the OCI specifications that containerd writes for runc. The second result is false without one.
func (l *lab) sandboxOf(pod string) (found sandbox, ok bool) {
	files, _ := filepath.Glob("/run/containerd/io.containerd.runtime.v2.task/k8s.io/*/config.json")
	for _, f := range files {
		var c struct {
			Annotations map[string]string
			Linux       struct{ Namespaces []struct{ Type, Path string } }
		}
		data, err := os.ReadFile(f)
		if err != nil || json.Unmarshal(data, &c) != nil {
			continue // the process has just ended
		}
		a := c.Annotations
		init, err := os.ReadFile(filepath.Join(filepath.Dir(f), "init.pid"))
		if err != nil || a["io.kubernetes.cri.container-type"] != "sandbox" || a["io.kubernetes.cri.sandbox-name"] != pod ||
			a["io.kubernetes.cri.sandbox-namespace"] != l.ns {
			continue
		}
		s := sandbox{id: filepath.Base(filepath.Dir(f))}
		for _, n := range c.Linux.Namespaces {
			if n.Type == "network" {
				s.netns = n.Path
			}
		}
		if _, err := fmt.Sscan(string(init), &s.pid); err == nil && syscall.Kill(s.pid, 0) == nil {
			found, ok = s, true
		}
	}
	return found, ok
}

// attached fails the test unless the pod has exactly these VFs as net1, net2 and so on beside eth0, and each container's output shows that
// it had them from its start.
func (l *lab) attached(pod string, ids ...string) {
	l.Helper()
	s, ok := l.sandboxOf(pod)
	all, err := interfaces(s.netns)
	if err != nil || !ok {
		l.Fatalf("pod %s: sandbox %+v: %v", pod, s, err)
	}
	got, want, names := map[string]string{}, map[string]string{}, []string{"eth0", "lo"} // sorted like the output of ls
	for _, i := range all {
		if i.Name != "lo" && i.Name != "eth0" {
			got[i.Name] = i.MAC
		}
	}
	for n, id := range ids {
		name := fmt.Sprint("net", n+1)
		want[name], names = l.before[id].MAC, append(names, name)
	}
	if !maps.Equal(got, want) || len(all) != len(ids)+2 {
		l.Errorf("pod %s, sandbox %+v, has %+v: want eth0, lo and %v, which are %v", pod, s, all, want, ids)
	}
	if written := journals(); slices.ContainsFunc(ids, func(id string) bool { return !slices.Contains(written, id) }) {
		l.Errorf("journals of %v: want also %v", written, ids)
	}
	for container, text := range l.logs(pod) {
		if !strings.Contains(text, "interfaces: "+strings.Join(names, " ")+"\n") {
			l.Errorf("container %s of pod %s started with %q: want %v", container, pod, text, names)
		}
	}
}

// logs returns the output of each container of a pod, once all have printed a line.
func (l *lab) logs(pod string) map[string]string {
	l.Helper()
	p, err := l.getPod(pod)
	if err != nil {
		l.Fatal(err)
	}
	texts := map[string]string{}
	within(l.T, "the containers of pod "+pod+" say something", func() error {
		for _, c := range p.Spec.Containers {
			files, _ := filepath.Glob(fmt.Sprintf("/var/log/pods/%s_%s_%s/%s/*.log", l.ns, pod, p.UID, c.Name))
			if len(files) == 0 {
				return errors.New("container " + c.Name + " has no log")
			}
			data, _ := os.ReadFile(files[len(files)-1])
			text := ""
			for line := range strings.Lines(string(data)) {
				_, rest, _ := strings.Cut(line, " F ")
				text += rest
			}
			if !strings.Contains(text, "interfaces:") {
				return fmt.Errorf("container %s says %q", c.Name, data)
			}
			texts[c.Name] = text
		}
		return nil
	})
	return texts
}

// variables returns those environment variables of a pod's container that list VFs.
func (l *lab) variables(pod, container string) map[string]string {
	l.Helper()
	found := map[string]string{}
	for line := range strings.Lines(l.logs(pod)[container]) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			found[name] = value
		}
	}
	return found
}

func (l *lab) describe() {
	ctx := context.Background()
	pods, err := l.client.CoreV1().Pods(l.ns).List(ctx, metav1.ListOptions{})
	if err != nil {
		l.Log(err)
		return
	}
	for _, p := range pods.Items {
		l.Logf("pod %s: %s %s %s\n%s", p.Name, p.Status.Phase, p.Status.Reason, p.Status.Message, strings.Join(l.events(p.Name), "\n"))
	}
	claims, err := l.client.ResourceV1().ResourceClaims(l.ns).List(ctx, metav1.ListOptions{})
	if err != nil {
		l.Log(err)
		return
	}
	for _, c := range claims.Items {
		status, _ := json.Marshal(c.Status)
		l.Logf("claim %s: %s", c.Name, status)
	}
	l.Logf("daemon:\n%s", tail(l.log, 30, ""))
	l.Logf("kubelet:\n%s", tail(filepath.Join(os.Getenv(dirEnv), nodeName, "kubelet.log"), 15, "dra", "DRA", "E1", "laim"))
}

// killSandbox kills a pod's sandbox; the kubelet creates a new sandbox.
func (l *lab) killSandbox(pod string) (former sandbox) {
	l.Helper()
	former, ok := l.sandboxOf(pod)
	if !ok {
		l.Fatalf("pod %s has no sandbox", pod)
	}
	if err := syscall.Kill(former.pid, syscall.SIGKILL); err != nil {
		l.Fatal(err)
	}
	return former
}

// awaitNewSandbox waits until the containers of a pod run in a new sandbox.
func (l *lab) awaitNewSandbox(pod string, former sandbox) {
	l.Helper()
	within(l.T, "pod "+pod+" has a new sandbox", func() error {
		if s, ok := l.sandboxOf(pod); !ok || s.id == former.id {
			return fmt.Errorf("it has %+v", s)
		}
		p, err := l.getPod(pod)
		if err != nil {
			return err
		}
		return isRunning(p)
	})
}

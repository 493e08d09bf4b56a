// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// startSet starts the shipped DaemonSet with this test's configuration and cards, in place of the process that newLab starts.
func (l *lab) startSet() {
	l.Helper()
	config, err := os.ReadFile(l.configFile())
	if err != nil {
		l.Fatal(err)
	}
	objects, err := shippedObjects()
	if err != nil {
		l.Fatal(err)
	}
	for _, o := range objects {
		switch o.GetKind() {
		case "ConfigMap":
			o.Object["data"] = map[string]any{"config.json": string(config)}
		case "DaemonSet":
			var set apps.DaemonSet
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &set); err != nil {
				l.Fatal(err)
			}
			l.adapt(&set)
			if o.Object, err = runtime.DefaultUnstructuredConverter.ToUnstructured(&set); err != nil {
				l.Fatal(err)
			}
		default:
			continue
		}
		if _, err := resourceOf(l.objects, o).Create(l.background(), o, metav1.CreateOptions{}); err != nil {
			l.Fatal(err)
		}
		l.Cleanup(func() { _ = resourceOf(l.objects, o).Delete(l.background(), o.GetName(), metav1.DeleteOptions{}) })
	}
}

// adapt gives the DaemonSet the test's cards and the node's image.
func (l *lab) adapt(set *apps.DaemonSet) {
	c := &set.Spec.Template.Spec.Containers[0]
	c.ImagePullPolicy = core.PullNever
	c.Args = append(c.Args, "--sysfs="+l.sysfs, "--poll=1s")
	c.VolumeMounts = append(c.VolumeMounts, core.VolumeMount{Name: "cards", MountPath: l.sysfs})
	set.Spec.Template.Spec.Volumes = append(set.Spec.Template.Spec.Volumes,
		core.Volume{Name: "cards", VolumeSource: core.VolumeSource{HostPath: &core.HostPathVolumeSource{Path: l.sysfs}}})
}

// rolledOut returns an error unless all pods of the DaemonSet have the latest version and are ready.
func (l *lab) rolledOut() error {
	set, err := l.client.AppsV1().DaemonSets("podlace").Get(l.background(), "sriov-device-plugin", metav1.GetOptions{})
	if err != nil {
		return err
	}
	s := set.Status
	if s.ObservedGeneration != set.Generation || s.UpdatedNumberScheduled != 1 || s.NumberReady != 1 || s.CurrentNumberScheduled != 1 {
		return fmt.Errorf("%+v", s)
	}
	pods, err := l.client.CoreV1().Pods("podlace").List(l.background(), metav1.ListOptions{LabelSelector: "app=sriov-device-plugin"})
	if err == nil && len(pods.Items) != 1 {
		err = fmt.Errorf("there are %d pods", len(pods.Items))
	}
	return err
}

// daemonLogs returns the logs of the DaemonSet's pods.
func daemonLogs() string {
	files, _ := filepath.Glob("/var/log/pods/podlace_sriov-device-plugin-*/*/*.log")
	var all []string
	for _, f := range files {
		all = append(all, f, tail(f, 15, ""))
	}
	return strings.Join(all, "\n")
}

// authorizerLate is in the kubelet's event if it reads a claim before the node authorizer has processed the pod's binding. The daemon has
// not been called yet, so this is no failure of it.
const authorizerLate = `is forbidden: User "system:node:`

// TestUpgrade updates the shipped DaemonSet while pods with claims start and end. No slice is written, and all pods keep their VFs.
func TestUpgrade(t *testing.T) {
	l := newLab(t, setup{})
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(daemonLogs())
		}
	})
	l.template("vf", "nic")
	l.pod("stays", "nic=+vf")
	l.runs("stays")
	stays := l.allocated(l.claimOf("stays", "nic"))
	l.end(syscall.SIGTERM)
	l.isPod = true // the shipped DaemonSet takes the place of the daemon
	t.Cleanup(func() { l.isPod = false })
	l.startSet()
	within(t, "the DaemonSet is ready", l.rolledOut)
	within(t, "all VFs are in slices", func() error { return l.offers(l.ids...) })
	l.attached("stays", stays...)
	mark := l.mark()
	sets := l.client.AppsV1().DaemonSets("podlace")
	for round := range 2 {
		set, err := sets.Get(t.Context(), "sriov-device-plugin", metav1.GetOptions{})
		if err == nil {
			set.Spec.Template.Annotations = map[string]string{"podlace.test/round": fmt.Sprint(round)}
			_, err = sets.Update(t.Context(), set, metav1.UpdateOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
		pods, failed := 0, 0
		for begin := time.Now(); l.rolledOut() != nil; pods++ {
			if time.Since(begin) > patience {
				t.Fatalf("the update does not end: %v", l.rolledOut())
			}
			name := fmt.Sprintf("pod-%d-%d", round, pods)
			l.pod(name, "nic=+vf")
			l.runs(name)
			l.attached(name, l.allocated(l.claimOf(name, "nic"))...)
			for _, m := range l.events(name) {
				if strings.Contains(m, "Failed") && !strings.Contains(m, authorizerLate) {
					failed++
					t.Logf("%s: %.300s", name, m)
				}
			}
			l.delete(name)
		}
		t.Logf("%d pods started and ended during the update, with %d failed attempts", pods, failed)
		if pods == 0 || failed > 0 {
			t.Errorf("%d pods, %d failed attempts", pods, failed)
		}
	}
	l.attached("stays", stays...)
	if w := l.writes(mark, "resourceslices"); len(w) > 0 {
		t.Errorf("the daemons wrote %d slices during the updates: %+v", len(w), w)
	}
	l.delete("stays")
	within(t, "the VFs are home", func() error { return errors.Join(l.noRecords(), l.allHome()) })
	if err := sets.Delete(t.Context(), "sriov-device-plugin", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	within(t, "the DaemonSet is gone", func() error {
		pods, err := l.client.CoreV1().Pods("podlace").List(t.Context(), metav1.ListOptions{LabelSelector: "app=sriov-device-plugin"})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("there are %d pods", len(pods.Items))
		}
		return err
	})
}

// TestTwoDaemons (failure 23): a second daemon on a node waits and logs the reason. It serves when the first one ends.
func TestTwoDaemons(t *testing.T) {
	l := newLab(t, setup{})
	second := *l.daemon
	second.cmd, second.log, second.http, second.socket = nil, l.log+".2", "/run/node/daemon2.sock", "/run/node/answers2.sock"
	second.flags = []string{"--registration", "registry"}
	mark := l.mark()
	second.run()
	t.Cleanup(func() { second.end(syscall.SIGTERM) })
	within(t, "the second daemon says that another one leads", func() error {
		if second.says("another instance") == 0 {
			return errors.New(tail(second.log, 5, ""))
		}
		return nil
	})
	l.claim("vf", "nic")
	l.pod("web", "nic=vf")
	l.runs("web")
	l.attached("web", l.allocated("vf")...)
	l.end(syscall.SIGKILL)
	second.ready()
	l.delete("web")
	if w := l.writes(mark, "resourceslices"); len(w) > 0 {
		t.Errorf("slices were written: %+v", w)
	}
	second.end(syscall.SIGTERM)
}

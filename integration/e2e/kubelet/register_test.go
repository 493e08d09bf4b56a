// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"path/filepath"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness/node"
	"github.com/podlace/podlace/pkg/poddevices"
)

// TestRegister: pods get VFs if the plugin registers through the kubelet's folder device-plugins or plugins_registry, whichever of the two
// starts first. Two VFs of a pod are on one NUMA node. The container's environment, the kubelet, the daemon's socket and `podlace sriov ls`
// report the same VFs.
func TestRegister(t *testing.T) {
	node.Skip(t)
	for _, registration := range []string{"classic", "registry"} {
		for _, first := range []string{"kubelet", "plugin"} {
			t.Run(registration+", the "+first+" first", func(t *testing.T) {
				l := prepareLab(t, "none", registration)
				if first == "kubelet" {
					l.runKubelet()
					l.runDaemon()
				} else {
					l.runDaemon()
					time.Sleep(500 * time.Millisecond) // the daemon finds no kubelet
					l.runKubelet()
				}
				t.Logf("registered %d ms after the start of the second", l.awaitReady(20*time.Second).Milliseconds())
				folder := map[string]string{"classic": "device-plugins", "registry": "plugins_registry"}[registration]
				if sockets, _ := filepath.Glob(filepath.Join(kubeletRoot, folder, "example.com_fast-*.sock")); len(sockets) != 1 {
					t.Errorf("sockets %v: want one in %s", sockets, folder)
				}
				one, two := l.runPod("one", vfs(1)), l.runPod("two", vfs(2))
				l.sameNUMA("two", two)
				if slices.Contains(two, one[0]) {
					t.Errorf("%v and %v: allocated twice", one, two)
				}
				l.checkReported("one", one)
				l.checkReported("two", two)
			})
		}
	}
}

// checkReported fails the test unless the daemon and `podlace sriov ls` report the given VFs for the pod.
func (l *testLab) checkReported(pod string, ids []string) {
	l.t.Helper()
	answer, err := poddevices.Ask(l.socketPath(), time.Now().Add(10*time.Second), poddevices.Question{Namespace: "shop", Pod: pod + "-node"})
	if err != nil {
		l.t.Fatal(err)
	}
	var got []string
	for _, d := range answer.Devices {
		got = append(got, d.ID)
	}
	if slices.Sort(got); !slices.Equal(got, ids) {
		l.t.Errorf("the daemon says that pod %s has %v: want %v", pod, got, ids)
	}
	list := l.listDevices()
	for _, id := range ids {
		if !regexp.MustCompile(`(?m)^.*` + regexp.QuoteMeta(id) + ` .*shop/` + pod + `-node`).MatchString(list) {
			l.t.Errorf("podlace sriov ls does not say that pod %s has %s:\n%s", pod, id, list)
		}
	}
}

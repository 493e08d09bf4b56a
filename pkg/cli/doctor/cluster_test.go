// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestClusterNode: doctor accepts what podlace-node installs, which has no host-local because podlace-bridge contains it. The remedy for a
// missing plugin names podlace-node, because 'make install' installs nothing with the prefix "podlace-".
func TestClusterNode(t *testing.T) {
	l := newLab(t)
	l.write("net.d/10-podlace.conflist", strings.Replace(ours, `"bridge", "bridge"`, `"podlace-bridge", "bridge"`, 1))
	for _, name := range []string{"bridge", "host-local"} {
		if err := os.Remove(l.BinDir + "/" + name); err != nil {
			t.Fatal(err)
		}
	}
	l.plugin("podlace-bridge", "plugin of Podlace v1")
	if found := append(l.problems("binaries"), l.problems("status")...); len(found) > 0 {
		t.Errorf("a complete installation: %q", found)
	}
	if err := os.Remove(l.BinDir + "/podlace-bridge"); err != nil {
		t.Fatal(err)
	}
	if found := l.problems("binaries"); len(found) != 1 || !strings.Contains(found[0], "podlace-bridge is missing") ||
		!strings.Contains(found[0], "podlace-node status") {
		t.Errorf("without podlace-bridge: %q", found)
	}
}

// TestForeignBridge: a missing host-local is reported if the bridge plugin is another project's.
func TestForeignBridge(t *testing.T) {
	l := newLab(t)
	l.plugin("bridge", "plugin v1.9.1")
	if err := os.Remove(l.BinDir + "/host-local"); err != nil {
		t.Fatal(err)
	}
	if found := strings.Join(l.problems("binaries"), "\n"); !strings.Contains(found, "error the plugin host-local is missing") {
		t.Error(found)
	}
}

// TestAgentCommand: if podlace-node does not run, the finding's command lists its pods in all namespaces.
func TestAgentCommand(t *testing.T) {
	l := newLab(t)
	l.status(`{"ready": true}`)
	if found := l.problems("node-agent"); len(found) != 1 || !strings.Contains(found[0], "kubectl get pods --all-namespaces ") {
		t.Errorf("%q", found)
	}
}

// TestNoNodeFile: the remedy for a missing node.json is 'podlace-node status' and not a change of the conflist, which is correct.
func TestNoNodeFile(t *testing.T) {
	l := newLab(t)
	l.write("net.d/10-podlace.conflist", strings.Replace(ours, "10.91.0.0/29", "usePodCidr", 1))
	if found := l.problems("addresses"); len(found) != 1 || !strings.Contains(found[0], " | podlace-node status") {
		t.Errorf("%q", found)
	}
}

// TestPodMissing: podlace-pod has the prefix on every node, so it is podlace-node's only where that has run.
func TestPodMissing(t *testing.T) {
	l := newLab(t)
	l.write("net.d/10-podlace.conflist", strings.Replace(ours, `"bridge", "bridge"`, `"podlace-pod", "bridge"`, 1))
	if found := strings.Join(l.problems("binaries"), "\n"); !strings.Contains(found, "podlace-pod is missing") ||
		!strings.Contains(found, "make install") {
		t.Errorf("without podlace-node: %s", found)
	}
	l.status(`{"ready": true}`)
	if found := strings.Join(l.problems("binaries"), "\n"); !strings.Contains(found, "podlace-node status") {
		t.Errorf("with podlace-node: %s", found)
	}
}

// TestCachedPluginMissing: a plugin is reported that only libcni's cache of a pod names.
func TestCachedPluginMissing(t *testing.T) {
	l := newLab(t)
	l.write("net.d/10-podlace.conflist", ours)
	for id, name := range map[string]string{"a": "podlace-pod", "b": "podlace-pod", "c": "tuning"} {
		config := []byte(strings.Replace(ours, `"bridge", "bridge"`, `"`+name+`", "bridge"`, 1))
		entry, err := json.Marshal(map[string]any{"kind": "cniCacheV1", "networkName": "pods", "containerId": id, "ifName": "eth0",
			"config": config})
		kerneltest.Must(t, err)
		l.machine("/var/lib/cni/results/pods-"+id+"-eth0", string(entry))
	}
	if found := l.problems("binaries"); len(found) > 0 {
		t.Errorf("containerd does not read the cache: %q", found)
	}
	l.write("etc/crio/crio.conf", crioConf(l, ""))
	if found := l.problems("binaries"); len(found) != 1 || !strings.Contains(found[0], "podlace-pod is missing") {
		t.Errorf("CRI-O: %q", found)
	}
	kerneltest.Must(t, os.Remove(l.ConfDir+"/10-podlace.conflist"))
	if found := strings.Join(l.problems("binaries"), "\n"); !strings.Contains(found, "podlace-pod is missing") {
		t.Errorf("CRI-O without a network: %q", found)
	}
}

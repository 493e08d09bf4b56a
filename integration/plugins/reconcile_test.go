// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/cli/reconcile"
)

// gcLab is a node with one network, whose emulated runtime lists its pods for GC. Pods can lose their namespace without a DEL.
type gcLab struct {
	*testing.T
	network *harness.Network
	conf    string
}

// tasks is the folder with which containerd says what it runs.
const tasks = "/run/containerd/io.containerd.runtime.v2.task"

func newCollector(t *testing.T) gcLab {
	t.Helper()
	harness.Need(t, "bridge", "host-local", "portmap", "bandwidth")
	c := gcLab{T: t, conf: t.TempDir()}
	// Without hairpinMode, bridge adds no element for a pod, which a lost record would leave behind until a real reboot.
	conflist := bytes.Replace(harness.ChainOf(t, "1.1.0", "nftables"), []byte(`"hairpinMode":true`), []byte(`"hairpinMode":false`), 1)
	if err := os.WriteFile(filepath.Join(c.conf, "10.conflist"), conflist, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(tasks, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll("/run/containerd") })
	var err error
	if c.network, err = harness.OpenNetwork(conflist, t.TempDir(), nil); err != nil {
		t.Fatal(err)
	}
	return c
}

// addPod attaches a pod until the test ends.
func (c gcLab) addPod(name string) {
	c.Helper()
	pod := harness.NewPod(c.T, name)
	rt := harness.Attachment(pod, name, map[string]any{"bandwidth": harness.Capabilities()["bandwidth"]})
	c.network.Must(c.T, "ADD", rt)
	c.Cleanup(func() { c.network.Must(c.T, "DEL", rt) })
}

// losePod attaches a pod and removes its namespace immediately.
func (c gcLab) losePod(name string) *libcni.RuntimeConf {
	c.Helper()
	pod := harness.NewPod(c.T, name)
	rt := harness.Attachment(pod, name, map[string]any{"bandwidth": harness.Capabilities()["bandwidth"]})
	c.network.Must(c.T, "ADD", rt)
	if err := pod.Close(); err != nil {
		c.Fatal(err)
	}
	return rt
}

func (c gcLab) list() ([]reconcile.Network, []*reconcile.Attachment) {
	c.Helper()
	networks, _, err := reconcile.Networks(c.conf)
	if err != nil {
		c.Fatal(err)
	}
	list, err := reconcile.List(networks)
	if err != nil {
		c.Fatal(err)
	}
	reconcile.Judge(list, reconcile.AskRuntimes(), false)
	return networks, list
}

// TestOldList (C-85): GC keeps a pod that was attached after the list of valid attachments was made, however old the list is, and one
// attached again with the same container ID.
func TestOldList(t *testing.T) {
	c := newCollector(t)
	c.addPod("oldlist-stays")
	before := harness.Watch(t)
	c.losePod("oldlist-lost")
	first := c.losePod("oldlist-back")
	networks, list := c.list()
	if dead := reconcile.Dead(list); len(list) != 3 || len(dead) != 2 {
		t.Fatalf("%d of %d pods are dead", len(dead), len(list))
	}
	c.network.Must(t, "DEL", first)
	late, back := harness.NewPod(t, "oldlist-late"), harness.NewPod(t, "oldlist-back")
	rtLate, rtBack := harness.Attachment(late, "oldlist-late", nil), harness.Attachment(back, "oldlist-back", nil)
	c.network.Must(t, "ADD", rtLate)
	c.network.Must(t, "ADD", rtBack)
	if err := kerneltest.Age(harness.StateDirs()...); err != nil {
		t.Fatal(err)
	}
	if err := reconcile.NewPlan(networks[0], list, harness.BinDir()).Collect(list); err != nil {
		t.Error(err)
	}
	c.network.Must(t, "CHECK", rtLate)
	c.network.Must(t, "CHECK", rtBack)
	_, after := c.list()
	if left := reconcile.Compare(list, after); left != 1 || len(after) != 3 {
		t.Errorf("%d of the dead pods remain, %d pods in all: want the reattached one, and three", left, len(after))
	}
	c.network.Must(t, "DEL", rtLate)
	c.network.Must(t, "DEL", rtBack)
	before.Clean(t, "GC with an old list")
}

// TestReboot (F-27): after a reboot, only the leases of the earlier pods exist.
func TestReboot(t *testing.T) {
	harness.Need(t, "podlace")
	c := newCollector(t)
	c.addPod("reboot-before") // creates the shared state
	before := harness.Watch(t)
	pod := harness.NewPod(t, "reboot-lost")
	c.network.Must(t, "ADD", harness.Attachment(pod, "reboot-lost", nil))
	if err := pod.Close(); err != nil {
		t.Fatal(err)
	}
	network := c.network.List.Name
	c.emulateReboot(network, "reboot-lost")
	cmd := exec.Command(filepath.Join(harness.BinDir(), "podlace"), "gc", "--yes", "--conf-dir", c.conf, "--bin-dir", harness.BinDir())
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "removed: made before the node was booted") ||
		!strings.Contains(string(out), "1 removed, 0 left") {
		t.Errorf("%v\n%s", err, out)
	}
	before.Clean(t, "podlace gc after a boot")
}

// emulateReboot removes an attachment's record, and makes the leases those of an earlier boot, except where an attachment has a record.
func (c gcLab) emulateReboot(network, id string) {
	c.Helper()
	key := attachment.Key{Network: network, ContainerID: id, IfName: "eth0"}
	records, _ := filepath.Glob("/run/podlace/" + network + "/*-" + key.Hash())
	if len(records) == 0 {
		c.Fatalf("%s has no record", id)
	}
	for _, path := range records {
		kerneltest.Must(c.T, os.Remove(path))
	}
	leases, _ := filepath.Glob("/var/lib/cni/networks/" + network + "/*")
	longAgo := time.Now().AddDate(-10, 0, 0) // the machine has really been booted later
	for _, path := range leases {
		kerneltest.Must(c.T, os.Chtimes(path, longAgo, longAgo))
	}
	kerneltest.Must(c.T, os.WriteFile("/var/lib/cni/networks/"+network+"/podlace_boot", []byte("earlier 0\n"), 0o600))
}

// TestLeftAlone: `podlace gc` reports plugins of other projects and keeps their attachments. It removes stale ones of a network whose
// configuration is gone.
func TestLeftAlone(t *testing.T) {
	harness.Need(t, "podlace")
	c := newCollector(t)
	c.addPod("alone-stays")
	before := harness.Watch(t)
	c.losePod("alone-lost")
	gc := func(wantExit int, args ...string) string {
		t.Helper()
		cmd := exec.Command(filepath.Join(harness.BinDir(), "podlace"), append([]string{"gc", "--yes"}, args...)...)
		out, _ := cmd.CombinedOutput()
		if exit := cmd.ProcessState.ExitCode(); exit != wantExit {
			t.Errorf("podlace gc %q: exit %d, want %d\n%s", args, exit, wantExit, out)
		}
		return string(out)
	}
	says := func(out string, want ...string) {
		t.Helper()
		for _, w := range want {
			if !strings.Contains(out, w) {
				t.Errorf("%s\ndoes not say %q", out, w)
			}
		}
	}
	foreign := t.TempDir()
	for _, name := range []string{"bridge", "portmap", "bandwidth"} {
		if err := os.WriteFile(filepath.Join(foreign, name), []byte("#!/bin/sh\nexit 1\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	says(gc(1, "--conf-dir", c.conf, "--bin-dir", foreign), "bridge is left alone: it is not Podlace's", "LEFT: namespace",
		"0 removed, 1 left")
	says(gc(1, "--conf-dir", t.TempDir(), "--bin-dir", foreign), "bridge is left alone: it is not Podlace's", "host-local is left alone",
		"1 left")
	// Without the configuration, `podlace gc` knows the network only from the records.
	says(gc(0, "--conf-dir", t.TempDir(), "--bin-dir", harness.BinDir()), "has no configuration in", "1 removed, 0 left")
	before.Clean(t, "GC by records alone")
	says(gc(2, "--conf-dir", filepath.Join(c.conf, "none")), "no such file")
}

// TestGCOfReference: `podlace gc` removes the hostPort and masquerade rules that the reference plugins made for a dead pod with its lease,
// also in a network whose configuration is gone, so that the hostPort does not lead to the next pod with the address.
func TestGCOfReference(t *testing.T) {
	harness.Need(t, "podlace")
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) {
			harness.NeedBackend(t, backend)
			if !harness.Present(harness.ReferenceDir(), "bridge") {
				t.Skip("SKIPPED: no reference plugins")
			}
			c := newCollector(t)
			theirs, err := harness.OpenNetwork(harness.ChainOf(t, "1.0.0", backend), t.TempDir(), nil)
			kerneltest.Must(t, err)
			theirs.CNI = libcni.NewCNIConfigWithCacheDir([]string{harness.ReferenceDir()}, t.TempDir(), theirs.Exec())
			stays, lost := harness.NewPod(t, "reference-stays"), harness.NewPod(t, "reference-lost")
			rt := harness.Attachment(stays, "reference-stays", nil)
			theirs.Must(t, "ADD", rt) // creates the shared state
			t.Cleanup(func() { theirs.Must(t, "DEL", rt) })
			first := harness.Attachment(lost, "reference-first", harness.Capabilities())
			theirs.Must(t, "ADD", first)
			theirs.Must(t, "DEL", first)
			before := harness.Watch(t)
			theirs.Must(t, "ADD", harness.Attachment(lost, "reference-lost", harness.Capabilities()))
			kerneltest.Must(t, lost.Close())
			leases, _ := filepath.Glob("/var/lib/cni/networks/" + theirs.List.Name + "/[0-9f]*")
			for _, path := range leases {
				kerneltest.Must(t, os.Chtimes(path, time.Now().Add(-time.Hour), time.Now().Add(-time.Hour)))
			}
			task := filepath.Join(tasks, "k8s.io/reference-stays")
			kerneltest.Must(t, os.MkdirAll(task, 0o755))
			conf := c.conf
			if backend == "iptables" {
				conf = t.TempDir()
			}
			out, err := exec.Command(filepath.Join(harness.BinDir(), "podlace"), "gc", "--yes", "--conf-dir", conf,
				"--bin-dir", harness.BinDir()).CombinedOutput()
			if err != nil || !strings.Contains(string(out), "1 removed, 0 left") {
				t.Errorf("%v\n%s", err, out)
			}
			before.Clean(t, "podlace gc of a pod of the reference")
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/store"
)

// TestTwice: the second sriov entry of a conflist does not attach the VFs of the first.
func TestTwice(t *testing.T) {
	l := newLab(t)
	*l.devices = []poddevices.Device{{Namespace: "shop", Pod: "web-0", Resource: fast, ID: vf0}}
	a := l.add("a", "resources", []string{fast})
	*l.devices = []poddevices.Device{{Namespace: "shop", Pod: "web-0", Resource: slow, ID: vf1}}
	o := l.Call("ADD", "a", "resources", []string{slow}, "ifName", "b{index}", "prevResult", a.prev)
	l.Fails(o, plugin.CodeAddressTaken, "the pod already has VF 0000:11:02.0 as net1")
	if !strings.Contains(o.Failure.Details, "If the conflist has the type sriov twice") {
		t.Errorf("%s", o.Stdout)
	}
	l.OK(a.check())
	l.del("a")
}

// newHiddenVF returns a pod that has moved its VF into an unnamed namespace.
func newHiddenVF(t *testing.T) testLab {
	l := newLab(t)
	pcitest.Kernel{}.Start(t, l.sriov.sysfs)
	l.allocate(vf0)
	l.add("a")
	cellar := kerneltest.NewPod(t)
	netns, err := os.Open(cellar.Path)
	must(t, err)
	t.Cleanup(func() { netns.Close() })
	home, err := l.host.File()
	must(t, err)
	t.Cleanup(func() { home.Close() })
	l.inPod(func(pod *kernel.NS) {
		link, _, err := pod.Link("net1")
		must(t, err, pod.MoveLink(link, netns, "mine"))
	})
	t.Cleanup(func() { // before the namespaces are removed
		ns, err := kernel.Open(netns)
		must(t, err)
		defer ns.Close()
		link, _, err := ns.Link("mine")
		must(t, err, ns.MoveLink(link, home, "ens0f0v0"))
		l.OK(l.Call("DEL", "a"))
	})
	return l
}

// TestResetHidden: a reset is refused if a pod has hidden the VF or its namespace cannot be opened.
func TestResetHidden(t *testing.T) {
	l := newHiddenVF(t)
	bound := l.boundAt(vf0)
	if out, err := l.runReset(vf0, true, nil); plugin.Code(err) != plugin.CodeDevice ||
		!strings.Contains(err.Error(), "its interface is in another namespace") {
		t.Errorf("%v\n%s", err, out)
	}
	// The path of the namespace is a symbolic link to itself, which cannot be opened. A path in another mount namespace causes a
	// similar error.
	must(t, os.Rename(l.journalOf(vf0), l.journalOf(vf0)+"~"))
	data, err := os.ReadFile(l.journalOf(vf0) + "~")
	loop := filepath.Join(t.TempDir(), "loop")
	must(t, err, os.Symlink(loop, loop), os.WriteFile(l.journalOf(vf0), []byte(strings.Replace(string(data), l.Pod.Path, loop, 1)), 0o600))
	if out, err := l.runReset(vf0, true, nil); err == nil || !strings.Contains(err.Error(), "open the namespace "+loop) {
		t.Errorf("%v\n%s", err, out)
	}
	must(t, os.Rename(l.journalOf(vf0)+"~", l.journalOf(vf0)))
	if at := l.boundAt(vf0); !at.Equal(bound) {
		t.Error("the driver was bound again")
	}
}

func networkLeases(network string) []string {
	found, _ := filepath.Glob("/var/lib/cni/networks/" + network + "/[0-9]*")
	return found
}

// TestDelReadsOwnLeases: DEL has the addresses of each VF in its record and reads no other lease, which is a folder here and would be
// logged.
func TestDelReadsOwnLeases(t *testing.T) {
	l := newLab(t, "ipam", object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.61.0.0/24"}}}})
	l.allocate(vf0)
	l.add("a")
	const folder = "/var/lib/cni/networks/net.vf/10.61.0.99"
	must(t, os.Mkdir(folder, 0o700))
	t.Cleanup(func() { _ = os.Remove(folder) })
	if log := l.OK(l.Call("DEL", "a")).Log; strings.Contains(log, "10.61.0.99") {
		t.Error(log)
	}
	if got := networkLeases("net.vf"); len(got) != 1 {
		t.Errorf("left %q", got)
	}
}

// TestGCSpares: GC keeps the addresses of pods with unreadable records, and those that another plugin has not released.
func TestGCSpares(t *testing.T) {
	l := newLab(t, "ipam", object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.61.0.0/24"}}}})
	l.allocate(vf0)
	l.add("live")
	record := store.Root + "/net/sriov-" + attachment.Key{Network: "net", ContainerID: "live", IfName: "eth0"}.Hash()
	good, err := os.ReadFile(record)
	must(t, err)
	gc := func() {
		t.Helper()
		l.OK(l.Call("GC", "", "prevResult", nil, "cni.dev/valid-attachments", []any{object{"containerID": "live", "ifname": "eth0"}}))
	}
	for _, unreadable := range []string{`{"format":2}`, strings.Replace(string(good), `"vfs":[`, `"vfs":[5,`, 1)} {
		must(t, os.WriteFile(record, []byte(unreadable), 0o600),
			os.WriteFile("/var/lib/cni/networks/net.vf/10.61.0.9", []byte("gone\r\nnet1"), 0o644))
		must(t, kerneltest.Age(kerneltest.StateDirs()...))
		gc()
		if got := networkLeases("net.vf"); len(got) != 1 || filepath.Base(got[0]) == "10.61.0.9" {
			t.Errorf("leases of VFs: %q", got)
		}
	}
	must(t, os.WriteFile(record, good, 0o600))

	// With a record of plugin bridge, this lease belongs to an attachment that is not removed yet.
	key := attachment.Key{Network: "net", ContainerID: "stale", IfName: "eth0"}
	must(t, os.MkdirAll("/var/lib/cni/networks/net", 0o755),
		os.WriteFile("/var/lib/cni/networks/net/10.61.0.9", []byte("stale\r\neth0"), 0o644),
		os.WriteFile("/var/lib/cni/networks/net/10.61.0.10", []byte("gone\r\neth0"), 0o644),
		os.WriteFile(store.Root+"/net/bridge-"+key.Hash(),
			[]byte(`{"format":1,"network":"net","containerID":"stale","ifname":"eth0","plugin":"bridge","netns":"`+l.Pod.Path+`","state":{}}`),
			0o600))
	must(t, kerneltest.Age(kerneltest.StateDirs()...))
	gc()
	if got := networkLeases("net"); len(got) != 1 || filepath.Base(got[0]) != "10.61.0.9" {
		t.Errorf("leases of bridge: %q", got)
	}
	must(t, os.Remove(store.Root+"/net/bridge-"+key.Hash()), os.RemoveAll("/var/lib/cni/networks/net"))
	l.del("live")
}

// TestDefaultRoute: the pod keeps its default route and gets no second one through the VF.
func TestDefaultRoute(t *testing.T) {
	l := newLab(t, "ipam", object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "192.0.2.0/24"}}},
		"routes": []any{object{"dst": "0.0.0.0/0"}, object{"dst": "198.51.100.0/24"}}})
	l.allocate(vf0)
	var eth0 kernel.Link
	own := kernel.Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.1.0.1")}
	netns, err := os.Open(l.Pod.Path)
	must(t, err)
	defer netns.Close()
	_, err = l.host.AddVeth(kernel.Veth{Host: "uplink", Pod: "eth0", Netns: netns})
	must(t, err)
	l.inPod(func(pod *kernel.NS) {
		eth0, _, err = pod.Link("eth0")
		must(t, err, pod.AddAddress(eth0, netip.MustParsePrefix("10.1.0.5/24"), false), pod.SetUp(eth0), pod.AddRoute(eth0, own))
	})
	a := l.add("a")
	l.inPod(func(pod *kernel.NS) {
		to, err := pod.RouteTo(netip.MustParseAddr("8.8.8.8"))
		if must(t, err); to != eth0.Index {
			t.Errorf("the way to the world leads through link %d", to)
		}
	})
	l.OK(a.check())
	l.del("a")
	must(t, l.host.DelLink("uplink"))
}

// TestCheckOldVersions: older CNI results have no PCI addresses. CHECK still fails without the record. It accepts a lower MTU than
// configured, because a later plugin may reduce it without changing the result.
func TestCheckOldVersions(t *testing.T) {
	for _, version := range []string{"1.1.0", "1.0.0", "0.4.0"} {
		t.Run(version, func(t *testing.T) {
			l := newLab(t, "cniVersion", version)
			ip := object{"address": "10.1.0.5/24", "interface": 0, "version": "4"}
			l.Conf = l.Conf.With("prevResult", object{"cniVersion": version, "interfaces": []any{object{"name": "eth0", "sandbox": l.Pod.Path}},
				"ips": []any{ip}})
			l.allocate(vf0)
			a := l.add("a")
			l.inPod(func(pod *kernel.NS) { link, _, err := pod.Link("net1"); must(t, err, pod.SetMTU(link, 1300)) })
			l.OK(a.check())
			record := store.Root + "/net/sriov-" + attachment.Key{Network: "net", ContainerID: "a", IfName: "eth0"}.Hash()
			must(t, os.Remove(record))
			l.Fails(a.check(), plugin.CodeStateDiffers, "the record of the pod's VFs is missing")
			l.del("a", "prevResult", a.prev)
			*l.devices = []poddevices.Device{}
			l.OK(l.Call("CHECK", "b"))
		})
	}
}

// TestDaemonBreaks: if the device plugin drops the connection or has another protocol version, ADD asks the kubelet and succeeds.
func TestDaemonBreaks(t *testing.T) {
	l := newLab(t)
	l.sriov.socket = filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", l.sriov.socket)
	must(t, err)
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			c, err := listener.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			c.Close()
		}
	}()
	o := l.Call("ADD", "a")
	l.Fails(o, plugin.CodeTryAgain, "ask the kubelet at /run/no-kubelet/pod-resources/kubelet.sock")
	if !strings.Contains(o.Log, "asking the kubelet instead") {
		t.Errorf("log %s", o.Log)
	}
}

// TestForeignArguments: the VF's IPAM plugin does not get the address that was requested for the pod's main interface.
func TestForeignArguments(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0)
	dir := t.TempDir()
	script := "#!/bin/sh\necho \"$CNI_COMMAND $CNI_IFNAME $CNI_ARGS\" >>" + dir +
		"/log\n[ $CNI_COMMAND = ADD ] && echo '{\"cniVersion\":\"1.1.0\",\"ips\":[{\"address\":\"10.9.0.5/24\"}]}'\nexit 0\n"
	must(t, os.WriteFile(filepath.Join(dir, "fake"), []byte(script), 0o755))
	args := "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;IP=10.1.0.5"
	for name, value := range map[string]string{"CNI_ARGS": args, "CNI_CONTAINERID": "a", "CNI_IFNAME": "eth0"} {
		t.Setenv(name, value)
	}
	l.OK(l.Call("ADD", "a", "ipam", object{"type": "fake"}, "CNI_PATH", dir, "CNI_ARGS", args))
	l.del("a", "ipam", object{"type": "fake"}, "CNI_PATH", dir)
	log, err := os.ReadFile(dir + "/log")
	if must(t, err); !strings.HasPrefix(string(log), "ADD net1 IgnoreUnknown=1;K8S_POD_NAME=web-0;K8S_POD_NAMESPACE=shop\n") ||
		strings.Contains(string(log), "IP=") {
		t.Errorf("%s", log)
	}
}

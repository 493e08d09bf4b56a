// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/harness/card"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// shippedConflist returns the shipped conflist for VFs, with sriov directly after bridge if early, or else last.
func shippedConflist(t *testing.T, early bool) object {
	t.Helper()
	data, err := conf.Conflist("10-podlace-sriov.conflist")
	if err != nil {
		t.Fatal(err)
	}
	list := harness.RawObject(t, string(data))
	plugins := list["plugins"].([]any)
	if early {
		last := len(plugins) - 1
		list["plugins"] = slices.Insert(plugins[:last:last], 1, plugins[last])
	}
	return list
}

// bothOrders runs a test with sriov directly after bridge, and with sriov last. The first two VFs of a simulated card are allocated to the
// pod.
func bothOrders(t *testing.T, test func(t *testing.T, l vfNode)) {
	harness.Need(t, "bridge", "portmap", "bandwidth", "sriov")
	for title, early := range harness.InOrder(map[string]bool{"sriov last": false, "sriov first": true}) {
		t.Run(title, func(t *testing.T) {
			card.New(t, 2)
			l := newVFNode(t, shippedConflist(t, early))
			l.warmUp(t, func(*libcni.RuntimeConf) {})
			test(t, l)
		})
	}
}

// vfNode is a node with VFs, a conflist, and a pod that has no network yet.
type vfNode struct {
	*harness.Network
	conflist []byte
	web      *sandbox.Pod
	oracle   *harness.Oracle
}

func newVFNode(t *testing.T, list object, path ...string) vfNode {
	t.Helper()
	l := vfNode{conflist: harness.Encode(list), web: harness.NewPod(t, harness.Plain(t))}
	var err error
	if l.Network, err = harness.OpenNetwork(l.conflist, t.TempDir(), nil); err != nil {
		t.Fatal(err)
	}
	if len(path) > 0 {
		l.CNI = libcni.NewCNIConfigWithCacheDir(path, t.TempDir(), l.Exec())
	}
	l.oracle = harness.Watch(t, l.web)
	return l
}

// warmUp runs ADD and DEL of another pod, to create the state that all pods share.
func (l vfNode) warmUp(t *testing.T, edit func(*libcni.RuntimeConf)) {
	t.Helper()
	pod := harness.NewPod(t, "warm-"+harness.Plain(t))
	rt := harness.Attachment(pod, "warm", containerdCaps())
	edit(rt)
	l.Must(t, "ADD", rt)
	l.Must(t, "DEL", rt)
	if err := pod.Close(); err != nil {
		t.Fatal(err)
	}
	l.oracle.Rebase(t)
}

// The capabilities that containerd and CRI-O pass for a pod with a port and limits. CRI-O maps hostPorts itself and passes none.
func containerdCaps() map[string]any {
	const bits = limitRate * 1_000_000
	return map[string]any{"portMappings": []any{object{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}},
		"bandwidth":                         object{"ingressRate": bits, "ingressBurst": 1<<32 - 1, "egressRate": bits, "egressBurst": 1<<32 - 1},
		"io.kubernetes.cri.pod-annotations": object{"example.com/note": "x"}}
}

func crioCaps() map[string]any {
	caps := containerdCaps()
	delete(caps, "portMappings")
	const bits = limitRate * 1_000_000
	caps["bandwidth"] = object{"ingressRate": bits, "ingressBurst": 1<<35 - 9, "egressRate": bits, "egressBurst": 1<<35 - 9}
	return caps
}

// checkComplete checks that the result has all configured interfaces, and the VFs none of the pod's addresses.
func (l vfNode) checkComplete(t *testing.T, result object) {
	t.Helper()
	var names []string
	for _, i := range result["interfaces"].([]any) {
		if of := i.(map[string]any); of["sandbox"] != nil {
			names = append(names, fmt.Sprint(of["name"], " ", of["pciID"]))
		}
	}
	if got := strings.Join(names, ", "); got != "eth0 <nil>, net1 "+card.Address(0)+", net2 "+card.Address(1) {
		t.Errorf("interfaces of the pod: %s", got)
	}
	// CRI-O treats every address in the result as an address of the pod.
	if got := harness.Addresses(t, result); len(got) != 2 || !strings.HasPrefix(got[0], "10.58.") || !strings.HasPrefix(got[1], "fd00:58::") {
		t.Errorf("addresses of the pod: %q", got)
	}
	for _, name := range []string{"net1", "net2"} {
		if shown := harness.Shell(t, "ip -n "+l.web.Name+" link show dev "+name); !strings.Contains(shown, ",UP") {
			t.Errorf("%s", shown)
		}
	}
}

// TestVFsByCRIO (F-35) emulates CRI-O: GC at the start, CHECK after every ADD, one DEL.
func TestVFsByCRIO(t *testing.T) {
	harness.Program(t, "ip")
	bothOrders(t, func(t *testing.T, l vfNode) {
		l.Must(t, "GC", nil) // CRI-O has no attachments: the list is null
		l.Must(t, "STATUS", nil)
		rt := harness.Attachment(l.web, l.web.Name, crioCaps())
		l.checkComplete(t, l.Must(t, "ADD", rt))
		l.Must(t, "CHECK", rt)
		checkLimitsHold(t, l.web, harness.IPv4Of(t, l.web), limitRate*1_000_000)

		again := l.restartedRuntime(t) // the restarted CRI-O knows its pods
		again.Must(t, "GC", nil, types.GCAttachment{ContainerID: rt.ContainerID, IfName: rt.IfName})
		l.Must(t, "CHECK", rt)
		l.Must(t, "DEL", rt)
		l.oracle.Clean(t, "a pod of CRI-O")

		l.Must(t, "ADD", rt) // the runtime has lost the pod and sends no DEL for the pod
		for _, name := range []string{"net1", "net2"} {
			card.Leave(t, l.web.Path, name)
		}
		if err := l.web.Close(); err != nil {
			t.Fatal(err)
		}
		again = l.restartedRuntime(t)
		again.Must(t, "GC", nil)
		card.Tell(t)
		l.oracle.Options.Pods = nil
		l.checkReturned(t, "GC at the start")
	})
}

// restartedRuntime returns a runtime that has lost libcni's cache, and makes all pods old enough for GC.
func (l vfNode) restartedRuntime(t *testing.T) *harness.Network {
	t.Helper()
	n, err := harness.OpenNetwork(l.conflist, t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := kerneltest.Age(harness.StateDirs()...); err != nil {
		t.Fatal(err)
	}
	return n
}

// checkReturned checks that the VFs are on the node and that no state of the pod remains.
func (l vfNode) checkReturned(t *testing.T, after string) {
	t.Helper()
	for i := range 2 {
		if shown := harness.Shell(t, "ip link show dev "+card.Name(i)); !strings.Contains(shown, "altname alt-"+card.Name(i)) {
			t.Errorf("after %s: %s", after, shown)
		}
	}
	l.oracle.Clean(t, after)
}

// TestVFsByContainerd (F-35): containerd sends no CHECK and no GC, but two or more DELs, the last one without a namespace.
func TestVFsByContainerd(t *testing.T) {
	harness.Program(t, "ip")
	bothOrders(t, func(t *testing.T, l vfNode) {
		rt := harness.Attachment(l.web, l.web.Name, containerdCaps())
		for _, how := range []string{"DEL with netns", "DEL without netns", "DEL without result"} {
			l.Must(t, "STATUS", nil)
			result := l.Must(t, "ADD", rt)
			l.checkComplete(t, result)
			server, err := harness.Serve(l.web, 80)
			if err != nil {
				t.Fatal(err)
			}
			for _, address := range []string{"127.0.0.1", "10.58.0.1", "fd00:58::1"} {
				harness.Reach(t, nil, net.JoinHostPort(address, "8080"), l.web)
			}
			server.Close()
			if how == "DEL with netns" {
				checkLimitsHold(t, l.web, harness.IPv4Of(t, l.web), limitRate*1_000_000)
			}
			n, del := l.Network, *rt
			if how != "DEL with netns" {
				del.NetNS = ""
			}
			if how == "DEL without result" {
				n = l.restartedRuntime(t)
			}
			n.Must(t, "DEL", &del)
			for range 2 {
				n.Must(t, "DEL", &del)
			}
			l.checkReturned(t, how)
		}
	})
}

// TestVFsFailedADD: ADD fails in a plugin after sriov. The single DEL of containerd restores the VF.
func TestVFsFailedADD(t *testing.T) {
	harness.Need(t, "bridge", "portmap", "bandwidth", "sriov")
	harness.Program(t, "ip")
	card.New(t, 2)
	l := newVFNode(t, shippedConflist(t, true))
	l.warmUp(t, func(*libcni.RuntimeConf) {})
	other := harness.NewPod(t, "vfs-other")
	rtOther := harness.Attachment(other, "other", map[string]any{"portMappings": containerdCaps()["portMappings"]})
	rtOther.Args = [][2]string{{"IgnoreUnknown", "1"}}
	l.Must(t, "ADD", rtOther)
	rt := harness.Attachment(l.web, l.web.Name, containerdCaps())
	if _, err := l.Do("ADD", rt, nil); err == nil || !strings.Contains(err.Error(), "8080") {
		t.Errorf("ADD of a port that another pod has: %v", err)
	}
	if shown := harness.Shell(t, "ip -n "+l.web.Name+" -br link"); !strings.Contains(shown, "net2") {
		t.Errorf("the VFs were not yet on the node: %s", shown)
	}
	l.Must(t, "DEL", rt)
	l.Must(t, "DEL", rtOther)
	l.checkReturned(t, "a failed ADD")
}

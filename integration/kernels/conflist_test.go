// SPDX-License-Identifier: Apache-2.0

package kernels

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// The node.json that 10-podlace-kubernetes.conflist needs.
const nodeJSON = `{"podCIDRs": ["10.244.1.0/24", "fd00:10:244:1::/64"], "clusterCIDRs": ["10.244.0.0/16", "fd00:10:244::/56"]}`

func TestConflists(t *testing.T) {
	files, err := filepath.Glob("../../conf/*.conflist")
	if err != nil || len(files) == 0 {
		t.Fatalf("no conflists: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".conflist"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(text), `"sriov"`) {
				t.Skip("SKIPPED: it needs a card with VFs; make vm runs the tests of the plugin sriov")
			}
			runConflist(t, text)
		})
	}
}

// A node has two pods of one conflist: web with hostPort 8080 and limits, other with neither.
type node struct {
	network    *harness.Network
	lan        *sandbox.Pod // a machine outside the node
	web, other *attached
	has        func(key string) bool // the conflist contains this text
}

// An attached pod has the network of the conflist.
type attached struct {
	*sandbox.Pod
	rt        *libcni.RuntimeConf
	peer      string // the interface on the node
	addresses []netip.Addr
}

// runConflist runs all verbs of one conflist, and tests between ADD and DEL what it promises.
func runConflist(t *testing.T, text []byte) {
	t.Cleanup(func() {
		harness.Shell(t, "nft flush ruleset; ip link del cni0 2>/dev/null || ip link del br-lan; rm -rf /run/podlace /var/lib/cni")
	})
	if err := os.MkdirAll("/run/podlace", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("/run/podlace/node.json", []byte(nodeJSON), 0o600); err != nil {
		t.Fatal(err)
	}
	network, err := harness.OpenNetwork(text, t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	n := &node{network: network, lan: harness.NewLAN(t), has: func(key string) bool { return strings.Contains(string(text), key) }}
	warm := harness.Named(harness.NewPod(t, "warm"), limitedWeb())
	for _, verb := range []string{"STATUS", "ADD", "CHECK", "DEL", "GC"} {
		network.Must(t, verb, warm)
	}
	oracle := harness.Watch(t, n.lan)
	n.web, n.other = n.add(t, "web", limitedWeb()), n.add(t, "other", nil)
	for _, part := range []struct {
		name  string
		needs string
		test  func(*testing.T)
	}{
		{"verbs", "", n.check}, {"frames", "", n.frames}, {"hostPorts", "portmap", n.hostPorts}, {"limits", "bandwidth", n.limits},
		{"guard", "antiSpoof", n.guard}, {"restore", "portmap", n.restore}, {"gc", "", n.collect},
	} {
		if part.needs == "" || n.has(`"`+part.needs+`"`) {
			t.Run(part.name, part.test)
		}
	}
	for _, verb := range []string{"DEL", "GC"} {
		network.Must(t, verb, n.web.rt)
	}
	oracle.Clean(t, "DEL")
}

const (
	limit    = 2_000_000 // bit/s of the pod web in each direction
	hostPort = "8080"
)

func limitedWeb() map[string]any {
	caps := harness.HostPort()
	caps["bandwidth"] = map[string]any{"ingressRate": limit, "ingressBurst": 1<<32 - 1, "egressRate": limit, "egressBurst": 1<<32 - 1}
	return caps
}

func (n *node) add(t *testing.T, name string, caps map[string]any) *attached {
	t.Helper()
	pod := harness.NewPod(t, name)
	a := &attached{Pod: pod, rt: harness.Named(pod, caps)}
	result := n.network.Must(t, "ADD", a.rt)
	var links struct{ Interfaces []struct{ Name string } }
	if err := json.Unmarshal(harness.Encode(result), &links); err != nil || len(links.Interfaces) < 3 {
		t.Fatalf("%v in %s", err, harness.Encode(result))
	}
	a.peer = links.Interfaces[1].Name
	for _, text := range harness.Addresses(t, result) {
		a.addresses = append(a.addresses, netip.MustParseAddr(text))
	}
	return a
}

// check runs STATUS, and CHECK of both pods.
func (n *node) check(t *testing.T) {
	n.network.Must(t, "STATUS", nil)
	for _, a := range []*attached{n.web, n.other} {
		n.network.Must(t, "CHECK", a.rt)
	}
}

// collect tests that GC keeps the pods that the runtime lists and removes all others.
func (n *node) collect(t *testing.T) {
	list := func(a *attached) types.GCAttachment {
		return types.GCAttachment{ContainerID: a.rt.ContainerID, IfName: a.rt.IfName}
	}
	if err := kerneltest.Age(harness.StateDirs()...); err != nil { // GC keeps attachments that are younger than a second
		t.Fatal(err)
	}
	n.network.Must(t, "GC", nil, list(n.web), list(n.other))
	n.network.Must(t, "CHECK", n.other.rt)
	n.network.Must(t, "GC", nil, list(n.web))
	n.network.Must(t, "CHECK", n.web.rt)
	if _, err := n.network.Do("CHECK", n.other.rt, nil); err == nil {
		t.Error("CHECK of a pod that GC removed succeeds")
	}
	n.network.Must(t, "DEL", n.other.rt)
}

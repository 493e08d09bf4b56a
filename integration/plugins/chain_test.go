// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"sync"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

func TestChain(t *testing.T) {
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		t.Run(version, func(t *testing.T) { chainLife(t, version, "nftables") })
	}
	t.Run("iptables", func(t *testing.T) {
		if _, err := exec.LookPath("iptables"); err != nil {
			t.Skip("SKIPPED: no iptables program")
		}
		chainLife(t, "1.0.0", "iptables")
	})
}

func chainLife(t *testing.T, version, backend string) {
	n, err := harness.OpenNetwork(harness.ChainOf(t, version, backend), t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	warm, web, client := harness.NewPod(t, "chain-warm"), harness.NewPod(t, "chain-web"), harness.NewPod(t, "chain-client")
	rtWarm, rtWeb, rtClient := harness.Attachment(warm, "warm", harness.Capabilities()),
		harness.Attachment(web, "web", harness.Capabilities()), harness.Attachment(client, "client", nil)
	n.Must(t, "ADD", rtWarm)
	n.Must(t, "DEL", rtWarm)
	before := harness.Watch(t, web, client)

	result := n.Must(t, "ADD", rtWeb)
	checkShape(t, "chain", version, result)
	n.Must(t, "ADD", rtClient)
	harness.ChainTraffic(t, web, client, harness.Addresses(t, result))
	if version >= "0.4.0" {
		n.Must(t, "CHECK", rtWeb)
		n.Must(t, "CHECK", rtClient)
	} else if _, err := n.Do("CHECK", rtWeb, nil); err == nil {
		t.Errorf("CHECK succeeded in version %s", version)
	}
	if version >= "1.1.0" {
		chainCollect(t, n, rtWeb, rtClient)
	}
	n.Must(t, "DEL", rtClient)
	n.Must(t, "DEL", rtWeb)
	before.Clean(t, "ADD and DEL of two pods")
}

// chainCollect runs GC with both pods as valid attachments, then with one, and attaches the other again.
func chainCollect(t *testing.T, n *harness.Network, rtWeb, rtClient *libcni.RuntimeConf) {
	t.Helper()
	n.Must(t, "STATUS", nil)
	web := types.GCAttachment{ContainerID: rtWeb.ContainerID, IfName: rtWeb.IfName}
	client := types.GCAttachment{ContainerID: rtClient.ContainerID, IfName: rtClient.IfName}
	both := harness.Watch(t)
	n.Must(t, "GC", nil, web, client)
	both.Clean(t, "GC with every pod valid")

	bare, err := harness.OpenNetwork(n.List.Bytes, t.TempDir(), nil) // libcni with an empty cache sends no DEL
	if err != nil {
		t.Fatal(err)
	}
	if err := kerneltest.Age(harness.StateDirs()...); err != nil {
		t.Fatal(err)
	}
	bare.Must(t, "GC", nil, web)
	if leaks, err := both.Diff(); err != nil || len(leaks) == 0 {
		t.Errorf("GC did not collect the pod %s: %v", client.ContainerID, err)
	}
	n.Must(t, "CHECK", rtWeb)
	n.Must(t, "DEL", rtClient)
	n.Must(t, "ADD", rtClient)
	n.Must(t, "CHECK", rtClient)
}

// TestChainParallel attaches and detaches many pods in parallel. loopback also runs for each, as in go-cni, containerd's CNI library.
func TestChainParallel(t *testing.T) {
	harness.Need(t, "loopback")
	n, err := harness.OpenNetwork(harness.ChainOf(t, "1.0.0", "nftables"), t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	lo, err := harness.OpenNetwork([]byte(`{"cniVersion":"1.0.0","name":"lo","plugins":[{"type":"loopback"}]}`), t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	warm := harness.NewPod(t, "parallel-warm")
	n.Must(t, "ADD", harness.Attachment(warm, "warm", harness.Capabilities()))
	n.Must(t, "DEL", harness.Attachment(warm, "warm", harness.Capabilities()))
	var pods []*sandbox.Pod
	for i := range 12 {
		pods = append(pods, harness.NewPod(t, fmt.Sprintf("parallel-%d", i)))
	}
	before := harness.Watch(t)
	for range 2 {
		attachAll(t, n, lo, pods)
		before.Clean(t, "parallel ADD and DEL")
	}
}

func attachAll(t *testing.T, n, lo *harness.Network, pods []*sandbox.Pod) {
	t.Helper()
	results := make([]object, len(pods))
	each := func(f func(i int, rt, rtLo *libcni.RuntimeConf) error) {
		var wait sync.WaitGroup
		for i, pod := range pods {
			caps := harness.Capabilities()
			caps["portMappings"] = []any{object{"hostPort": 9000 + i, "containerPort": 80, "protocol": "tcp"}}
			rt, rtLo := harness.Attachment(pod, pod.Name, caps), harness.Attachment(pod, pod.Name, nil)
			rtLo.IfName = "lo"
			wait.Go(func() {
				if err := f(i, rt, rtLo); err != nil {
					t.Errorf("%s: %v", pod.Name, err)
				}
			})
		}
		wait.Wait()
	}
	each(func(i int, rt, rtLo *libcni.RuntimeConf) error {
		loDone := make(chan error)
		go func() { _, err := lo.Do("ADD", rtLo, nil); loDone <- err }()
		result, err := n.Do("ADD", rt, nil)
		if err == nil {
			results[i] = harness.RawObject(t, string(harness.Encode(result)))
		}
		return errors.Join(err, <-loDone)
	})
	checkDistinct(t, results)
	each(func(_ int, rt, rtLo *libcni.RuntimeConf) error {
		_, err := n.Do("DEL", rt, nil)
		_, errLo := lo.Do("DEL", rtLo, nil)
		return errors.Join(err, errLo)
	})
}

func checkDistinct(t *testing.T, results []object) {
	t.Helper()
	var seen []string
	for _, r := range results {
		for _, address := range harness.Addresses(t, r) {
			if slices.Contains(seen, address) {
				t.Errorf("address %s was assigned twice", address)
			}
			seen = append(seen, address)
		}
	}
	if len(seen) != 2*len(results) {
		t.Errorf("%d addresses for %d pods, want two each", len(seen), len(results))
	}
}

// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/harness/card"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
)

// callLimit is far more than any verb takes.
const callLimit = 30 * time.Second

// The pod of all examples.
const (
	podName     = "web-0"
	containerID = "example"
)

// testNetwork calls the plugins of a network configuration through libcni.
type testNetwork struct {
	list  *libcni.NetworkConfigList
	cni   *libcni.CNIConfig
	cache string // the runtime's folder for results
	caps  map[string]any
}

func openNetwork(t testing.TB, config string, bin string, caps map[string]any) testNetwork {
	t.Helper()
	list, err := libcni.NetworkConfFromBytes(asList(t, config))
	if err != nil {
		t.Fatal(err)
	}
	return testNetwork{list: list, cache: t.TempDir(), caps: caps}.withPlugins(bin)
}

// withPlugins returns a copy of the network with the plugins of another folder.
func (n testNetwork) withPlugins(bin string) testNetwork {
	return n.withExec(bin, &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: os.Stderr}})
}

// withExec returns a copy of the network with the plugins of another folder, which libcni starts through exec.
func (n testNetwork) withExec(bin string, exec invoke.Exec) testNetwork {
	n.cni = libcni.NewCNIConfigWithCacheDir([]string{bin}, n.cache, exec)
	return n
}

func asList(t testing.TB, config string) []byte {
	t.Helper()
	var conf map[string]any
	if err := json.Unmarshal([]byte(config), &conf); err != nil {
		t.Fatalf("%v in %s", err, config)
	}
	if conf["plugins"] == nil {
		conf = map[string]any{"cniVersion": conf["cniVersion"], "name": conf["name"], "plugins": []any{conf}}
	}
	return encode(t, conf)
}

func encode(t testing.TB, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func (n testNetwork) runtime(id string, pod *sandbox.Pod) *libcni.RuntimeConf {
	ifname := "eth0"
	if n.isLoopback() {
		ifname = "lo"
	}
	return &libcni.RuntimeConf{ContainerID: id, NetNS: pod.Path, IfName: ifname, CapabilityArgs: n.caps,
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_NAME", podName}}}
}

func (n testNetwork) isLoopback() bool { return n.list.Plugins[0].Network.Type == "loopback" }

// mustAdd runs ADD and returns the result as JSON. If the test fails, DEL runs at its end.
func (n testNetwork) mustAdd(t testing.TB, id string, pod *sandbox.Pod) []byte {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			n.del(t, id, pod)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), callLimit)
	defer cancel()
	result, err := n.cni.AddNetworkList(ctx, n.list, n.runtime(id, pod))
	if err != nil {
		t.Fatalf("ADD: %v", err)
	}
	return encode(t, result)
}

// tryAdd returns the error of ADD, so that goroutines can call it, unlike mustAdd.
func (n testNetwork) tryAdd(t testing.TB, id string, pod *sandbox.Pod) error {
	ctx, cancel := context.WithTimeout(t.Context(), callLimit)
	defer cancel()
	_, err := n.cni.AddNetworkList(ctx, n.list, n.runtime(id, pod))
	return err
}

func (n testNetwork) check(t testing.TB, id string, pod *sandbox.Pod) error {
	t.Helper()
	if ok, err := version.GreaterThanOrEqualTo(n.list.CNIVersion, "0.4.0"); err != nil || !ok {
		return err
	}
	ctx, cancel := context.WithTimeout(t.Context(), callLimit)
	defer cancel()
	return n.cni.CheckNetworkList(ctx, n.list, n.runtime(id, pod))
}

func (n testNetwork) del(t testing.TB, id string, pod *sandbox.Pod) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	if err := n.cni.DelNetworkList(ctx, n.list, n.runtime(id, pod)); err != nil {
		t.Errorf("DEL: %v", err)
	}
}

// removeState removes the network's bridges and leases, so that examples do not affect one another.
func (n testNetwork) removeState(t testing.TB) {
	t.Helper()
	host, err := kernel.Host()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	for _, p := range n.list.Plugins {
		var conf struct{ Type, Bridge string }
		if err := json.Unmarshal(p.Bytes, &conf); err != nil {
			t.Fatal(err)
		}
		if conf.Type == "bridge" {
			if conf.Bridge == "" {
				conf.Bridge = "cni0"
			}
			if err := host.DelLink(conf.Bridge); err != nil {
				t.Error(err)
			}
		}
	}
	if err := os.RemoveAll(filepath.Join("/var/lib/cni/networks", n.list.Name)); err != nil {
		t.Error(err)
	}
}

// runVerbs runs ADD, CHECK and two DELs with a new configuration, as a runtime does, and returns the result of the first ADD. After the
// last DEL, only state of the network may remain, such as the chains of its rules.
func runVerbs(t *testing.T, config string, caps map[string]any) []byte {
	t.Helper()
	if strings.Contains(config, `"sriov"`) {
		card.New(t, 1)
	}
	n := openNetwork(t, config, harness.BinDir(), caps)
	needTools(t, config)
	n.removeState(t)
	t.Cleanup(func() { n.removeState(t) })
	first := newPod(t, podName)
	result := n.mustAdd(t, containerID, first)
	n.del(t, containerID, first)

	pod := kerneltest.NewPod(t)
	if n.isLoopback() {
		pod = first // after the first ADD lo keeps the addresses that the kernel gave it
	}
	t.Cleanup(func() { n.del(t, "second", pod) })
	kerneltest.Clean(t, pod)
	n.mustAdd(t, "second", pod)
	if err := n.check(t, "second", pod); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	n.del(t, "second", pod)
	return result
}

func newPod(t testing.TB, name string) *sandbox.Pod {
	t.Helper()
	pod, err := sandbox.NewPod(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pod.Close() })
	return pod
}

// needTools skips an iptables configuration if iptables is not installed.
func needTools(t testing.TB, config string) {
	t.Helper()
	if usesIPTables(config) && (!iptables.Installed(true) || !iptables.Installed(false)) {
		skipMissing(t, "iptables")
	}
}

// usesIPTables reports whether a configuration selects the iptables backend or has a key that only this one supports.
func usesIPTables(config string) bool {
	return slices.ContainsFunc([]string{`"iptables"`, "externalSetMarkChain", "markMasqBit"},
		func(s string) bool { return strings.Contains(config, s) })
}

// runPlugin runs one plugin for the pod of the examples and returns its standard output.
func runPlugin(t testing.TB, verb, config string, pod *sandbox.Pod) (stdout []byte, ok bool) {
	t.Helper()
	var conf struct{ Type string }
	if err := json.Unmarshal([]byte(config), &conf); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), callLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(harness.BinDir(), conf.Type))
	cmd.Env = []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + containerID, "CNI_NETNS=" + pod.Path, "CNI_IFNAME=eth0",
		"CNI_PATH=" + harness.BinDir(), "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=" + podName}
	cmd.Stdin = strings.NewReader(config)
	var out bytes.Buffer
	cmd.Stdout = &out
	err := cmd.Run()
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return out.Bytes(), err == nil
}

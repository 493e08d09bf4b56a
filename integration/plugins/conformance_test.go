// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// testNode is a node with one network of bridge, portmap and bandwidth, whose calls a test makes one by one and can edit.
type testNode struct {
	*testing.T
	confs []object
}

// newNode creates a network for one test. A first pod creates the state that all pods share, so that later comparisons show single pods
// only.
func newNode(t *testing.T, network string, subnet int, backend string) testNode {
	t.Helper()
	harness.Need(t, "bridge", "host-local", "portmap", "bandwidth")
	harness.NeedBackend(t, backend)
	common := object{"cniVersion": "1.1.0", "name": network}
	n := testNode{t, []object{
		common.With("type", "bridge", "bridge", network, "isGateway", true, "isDefaultGateway", true, "hairpinMode", true, "ipMasq", true,
			"ipMasqBackend", backend, "ipam", object{"type": "host-local", "ranges": []any{
				[]any{object{"subnet": fmt.Sprintf("10.%d.0.0/16", subnet)}}, []any{object{"subnet": fmt.Sprintf("fd00:%d::/64", subnet)}}}}),
		common.With("type", "portmap", "backend", backend, "runtimeConfig", harness.Mappings(harness.Port(subnet*100, 80, "tcp"))),
		common.With("type", "bandwidth", "runtimeConfig", object{"bandwidth": object{"ingressRate": 90_000_000, "egressRate": 80_000_000}}),
	}}
	first := n.attach(network + "-first")
	first.delChain()
	return n
}

// withKeys returns a copy in which plugin i has the given keys.
func (n testNode) withKeys(i int, pairs ...any) testNode {
	n.confs = slices.Clone(n.confs)
	n.confs[i] = n.confs[i].With(pairs...)
	return n
}

func (n testNode) inSubtest(t *testing.T) testNode {
	n.T = t
	return n
}

type attachedPod struct {
	testNode
	pod    *sandbox.Pod
	ifname string
	prev   json.RawMessage // result of the whole chain
	result types100.Result
}

func (n testNode) attach(id string) attachedPod {
	n.Helper()
	return n.attachTo(harness.NewPod(n.T, id), "eth0")
}

func (n testNode) attachTo(pod *sandbox.Pod, ifname string) attachedPod {
	n.Helper()
	h := attachedPod{testNode: n, pod: pod, ifname: ifname}
	for i := range n.confs {
		h.prev = json.RawMessage(h.callOf(i, "ADD").Run(n.T).OK(n.T).Stdout)
	}
	if err := json.Unmarshal(h.prev, &h.result); err != nil {
		n.Fatal(err)
	}
	return h
}

// callOf returns the call with which libcni starts plugin i of the chain.
func (h attachedPod) callOf(i int, verb string) harness.Call {
	conf := h.confs[i]
	if h.prev != nil {
		conf = conf.With("prevResult", h.prev)
	}
	return harness.NewCall(verb, conf["type"].(string), h.pod, h.pod.Name, conf).With("CNI_IFNAME", h.ifname)
}

// delChain runs DEL of all plugins in reverse order, edited by the given functions.
func (h attachedPod) delChain(edits ...func(harness.Call) harness.Call) {
	h.Helper()
	for i := range slices.Backward(h.confs) {
		c := h.callOf(i, "DEL")
		for _, edit := range edits {
			c = edit(c)
		}
		c.Run(h.T).OK(h.T)
	}
}

func (h attachedPod) checkChain() {
	h.Helper()
	for i := range h.confs {
		h.callOf(i, "CHECK").Run(h.T).OK(h.T)
	}
}

func editedKeys(pairs ...any) func(harness.Call) harness.Call {
	return func(c harness.Call) harness.Call {
		var conf object
		if err := json.Unmarshal(c.Stdin, &conf); err != nil {
			panic(err)
		}
		return c.Config(conf.With(pairs...))
	}
}

func inNamespace(path string) func(harness.Call) harness.Call {
	return func(c harness.Call) harness.Call { return c.With("CNI_NETNS", path) }
}

// The pod's links on the node.
func (h attachedPod) hostVeth() string  { return h.result.Interfaces[1].Name }
func (h attachedPod) ifbDevice() string { return h.result.Interfaces[3].Name }

// onHost changes a link of the node, and inPod one of the pod.
func onHost(name string, f func(netlink.Link) error) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return f(link)
}

func (h attachedPod) inPod(f func(netlink.Link) error) error {
	return h.pod.Do(func() error { return onHost(h.ifname, f) })
}

// flushRules flushes all rules, as a firewall does when it starts.
func flushRules() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	c.FlushRuleset()
	return c.Flush()
}

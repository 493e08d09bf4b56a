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
	"github.com/podlace/podlace/pkg/sandbox"
)

// node is a test node with one network that uses all plugins of the chain. A test calls the plugins one by one and may edit each call.
type node struct {
	*testing.T
	confs []object
}

// newNode creates a separate network for a test, and attaches and detaches a first pod. So the oracle sees only the state of later
// pods.
func newNode(t *testing.T, network string, subnet int, backend string) node {
	t.Helper()
	harness.Need(t, "bridge", "host-local", "portmap", "bandwidth")
	harness.NeedBackend(t, backend)
	common := object{"cniVersion": "1.1.0", "name": network}
	n := node{t, []object{
		common.With("type", "bridge", "bridge", network, "isGateway", true, "isDefaultGateway", true, "hairpinMode", true, "ipMasq", true,
			"ipMasqBackend", backend, "ipam", object{"type": "host-local", "ranges": []any{
				[]any{object{"subnet": fmt.Sprintf("10.%d.0.0/16", subnet)}}, []any{object{"subnet": fmt.Sprintf("fd00:%d::/64", subnet)}}}}),
		common.With("type", "portmap", "backend", backend, "runtimeConfig", harness.Mappings(harness.Port(subnet*100, 80, "tcp"))),
		common.With("type", "bandwidth", "runtimeConfig", object{"bandwidth": object{"ingressRate": 90_000_000, "egressRate": 80_000_000}}),
	}}
	first := n.attach(network + "-first")
	first.del()
	return n
}

// with returns the node with edited keys in the configuration of plugin number i.
func (n node) with(i int, pairs ...any) node {
	n.confs = slices.Clone(n.confs)
	n.confs[i] = n.confs[i].With(pairs...)
	return n
}

// in returns the node for a subtest.
func (n node) in(t *testing.T) node {
	n.T = t
	return n
}

// held is an attachment of a pod to the network of a node.
type held struct {
	node
	pod    *sandbox.Pod
	ifname string
	prev   json.RawMessage // result of the whole chain
	result types100.Result
}

func (n node) attach(id string) held {
	n.Helper()
	return n.attachTo(harness.NewPod(n.T, id), "eth0")
}

func (n node) attachTo(pod *sandbox.Pod, ifname string) held {
	n.Helper()
	h := held{node: n, pod: pod, ifname: ifname}
	for i := range n.confs {
		h.prev = json.RawMessage(h.call(i, "ADD").Run(n.T).OK(n.T).Stdout)
	}
	if err := json.Unmarshal(h.prev, &h.result); err != nil {
		n.Fatal(err)
	}
	return h
}

// call returns a call of plugin number i, as libcni makes it.
func (h held) call(i int, verb string) harness.Call {
	conf := h.confs[i]
	if h.prev != nil {
		conf = conf.With("prevResult", h.prev)
	}
	return harness.NewCall(verb, conf["type"].(string), h.pod, h.pod.Name, conf).With("CNI_IFNAME", h.ifname)
}

// del runs DEL of the chain with each call edited.
func (h held) del(edits ...func(harness.Call) harness.Call) {
	h.Helper()
	for i := range slices.Backward(h.confs) {
		c := h.call(i, "DEL")
		for _, edit := range edits {
			c = edit(c)
		}
		c.Run(h.T).OK(h.T)
	}
}

// check runs CHECK of the chain.
func (h held) check() {
	h.Helper()
	for i := range h.confs {
		h.call(i, "CHECK").Run(h.T).OK(h.T)
	}
}

// edited returns a function that changes keys of a call's configuration.
func edited(pairs ...any) func(harness.Call) harness.Call {
	return func(c harness.Call) harness.Call {
		var conf object
		if err := json.Unmarshal(c.Stdin, &conf); err != nil {
			panic(err)
		}
		return c.Config(conf.With(pairs...))
	}
}

// inNamespace returns a function that replaces a call's namespace.
func inNamespace(path string) func(harness.Call) harness.Call {
	return func(c harness.Call) harness.Call { return c.With("CNI_NETNS", path) }
}

// hostSide and ifb return the names of the attachment's links on the node.
func (h held) hostSide() string { return h.result.Interfaces[1].Name }
func (h held) ifb() string      { return h.result.Interfaces[3].Name }

// onHost changes a link of the node; inPod changes a link of the pod.
func onHost(name string, f func(netlink.Link) error) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return f(link)
}

func (h held) inPod(f func(netlink.Link) error) error {
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

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/podlace/podlace/integration/meter"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

const (
	verbAdd   = "ADD"
	verbCheck = "CHECK"
	verbDel   = "DEL"

	scenarioNftables = "full nftables"
	scenarioIptables = "full iptables"

	cniVersion    = "1.0.0"
	podInterface  = "eth0"
	podPort       = 80
	podRate       = 20_000_000 // bit/s
	runtimeBurst  = 1<<32 - 1  // containerd sends this if an annotation gives only a rate
	resultsFolder = "/var/lib/cni/networks"
)

// scenario is a chain of plugins that runs with Podlace and with the reference plugins.
type scenario struct {
	name    string
	backend string // backend of portmap and of masquerade
	subnet  string
	port    int
}

func scenarios() []scenario {
	return []scenario{
		{name: scenarioIptables, backend: "iptables", subnet: "10.90.0.0/16", port: 18081},
	}
}

func nftables() scenario {
	return scenario{name: scenarioNftables, backend: "nftables", subnet: "10.89.0.0/16", port: 18080}
}

// slug returns a short name that is valid in names of networks and pods.
func (s scenario) slug() string { return s.backend }

func (s scenario) bridge() string { return "br-" + s.slug() }

type pluginConf map[string]any

// pluginEntries returns the plugins of the conflist, which is the same for both plugin sets.
func (s scenario) pluginEntries() []pluginConf {
	bridge := pluginConf{
		"type": "bridge", "bridge": s.bridge(), "isDefaultGateway": true,
		"ipam": map[string]any{"type": "host-local", "ranges": [][]map[string]any{{{"subnet": s.subnet}}}},
	}
	bridge["ipMasq"], bridge["ipMasqBackend"] = true, s.backend
	return []pluginConf{
		bridge,
		{"type": "portmap", "backend": s.backend, "snat": true, "capabilities": map[string]bool{"portMappings": true}},
		bandwidthPlugin(),
	}
}

func bandwidthPlugin() pluginConf {
	return pluginConf{"type": "bandwidth", "capabilities": map[string]bool{"bandwidth": true}}
}

// annotatedLimits returns the bandwidth capability that a runtime passes for a pod with two bandwidth annotations.
func annotatedLimits(rate uint64) map[string]uint64 {
	return map[string]uint64{"ingressRate": rate, "ingressBurst": runtimeBurst, "egressRate": rate, "egressBurst": runtimeBurst}
}

// capabilities returns what a runtime passes for a pod with one hostPort and, if limited, two bandwidth annotations.
func (s scenario) capabilities(limited bool) map[string]any {
	args := map[string]any{
		"portMappings": []map[string]any{{"hostPort": s.port, "containerPort": podPort, "protocol": "tcp"}},
	}
	if limited {
		args["bandwidth"] = annotatedLimits(podRate)
	}
	return args
}

// chain runs the plugins of one plugin folder for one attachment, in the same order as libcni.
type chain struct {
	folder  string
	network string
	id      string
	node    *sandbox.Pod
	pod     *sandbox.Pod
	plugins []pluginConf
	args    map[string]any
	result  json.RawMessage
}

// invocation is one call of a plugin, which is one process.
type invocation struct {
	name  string
	path  string
	args  []string
	env   []string
	stdin []byte
}

// processRunner starts a plugin process and returns its standard output.
type processRunner func(invocation) ([]byte, error)

func (c *chain) run(verb string, exec processRunner) error {
	return c.node.Do(func() error {
		if verb == verbAdd {
			c.result = nil
		}
		for _, p := range c.orderedPlugins(verb) {
			if err := c.one(verb, p, exec); err != nil {
				return err
			}
		}
		return nil
	})
}

// orderedPlugins returns the plugins in the order of the conflist, or in reverse order for DEL.
func (c *chain) orderedPlugins(verb string) []pluginConf {
	plugins := slices.Clone(c.plugins)
	if verb == verbDel {
		slices.Reverse(plugins)
	}
	return plugins
}

func (c *chain) one(verb string, p pluginConf, exec processRunner) error {
	inv, err := c.invocation(verb, p)
	if err != nil {
		return err
	}
	out, err := exec(inv)
	if err != nil {
		return fmt.Errorf("%s %s: %w", inv.path, verb, err)
	}
	if verb == verbAdd {
		c.result = out
	}
	return nil
}

func (c *chain) invocation(verb string, p pluginConf) (invocation, error) {
	stdin, err := json.Marshal(c.stdinOf(p))
	if err != nil {
		return invocation{}, fmt.Errorf("encode configuration: %w", err)
	}
	kind, _ := p["type"].(string)
	env := append(os.Environ(), "CNI_COMMAND="+verb, "CNI_PATH="+c.folder)
	if verb != verbStatus && verb != verbGC { // STATUS and GC concern no attachment
		env = append(env, "CNI_CONTAINERID="+c.id, "CNI_NETNS="+c.pod.Path, "CNI_IFNAME="+podInterface,
			"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=bench;K8S_POD_NAME="+c.pod.Name)
	}
	return invocation{name: kind, path: filepath.Join(c.folder, kind), stdin: stdin, env: env}, nil
}

// stdinOf returns the plugin's configuration with what libcni adds: name and version of the network, prevResult, and the capability
// arguments that the plugin declares.
func (c *chain) stdinOf(p pluginConf) pluginConf {
	conf := pluginConf{"cniVersion": cniVersion, "name": c.network}
	for key, value := range p {
		conf[key] = value
	}
	if c.result != nil {
		conf["prevResult"] = c.result
	}
	declared, _ := p["capabilities"].(map[string]bool)
	runtime := map[string]any{}
	for key, value := range c.args {
		if declared[key] {
			runtime[key] = value
		}
	}
	if len(runtime) > 0 {
		conf["runtimeConfig"] = runtime
	}
	return conf
}

// podAddress returns the pod's first address and its gateway.
func (c *chain) podAddress() (pod, gateway netip.Addr, err error) {
	var result struct {
		IPs []struct {
			Address netip.Prefix
			Gateway netip.Addr
		}
	}
	if err := json.Unmarshal(c.result, &result); err != nil {
		return pod, gateway, fmt.Errorf("decode the chain's result: %w", err)
	}
	if len(result.IPs) == 0 {
		return pod, gateway, errors.New("the chain's result has no address")
	}
	return result.IPs[0].Address.Addr(), result.IPs[0].Gateway, nil
}

func (c *chain) flowOf(direction string) (meter.Flow, error) {
	address, gateway, err := c.podAddress()
	if direction == intoPod {
		return meter.Flow{From: c.node.Do, To: c.pod.Do, Listen: netip.AddrPortFrom(address, 0)}, err
	}
	return meter.Flow{From: c.pod.Do, To: c.node.Do, Listen: netip.AddrPortFrom(gateway, 0)}, err
}

// whileAttached runs f between ADD and DEL.
func (c *chain) whileAttached(f func() error) (err error) {
	defer func() { err = errors.Join(err, c.run(verbDel, executeProcess)) }()
	if err := c.run(verbAdd, executeProcess); err != nil {
		return err
	}
	return f()
}

// executeProcess runs a plugin without measuring it, and returns its standard output.
func executeProcess(inv invocation) ([]byte, error) {
	out, _, err := inv.runTimed()
	return out, err
}

// cost is the wall time from the fork to the end, and the processor time.
type cost struct{ wall, cpu time.Duration }

func (inv invocation) runTimed() ([]byte, cost, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(inv.path, inv.args...)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = inv.env, bytes.NewReader(inv.stdin), &stdout, &stderr
	start := time.Now()
	err := cmd.Run()
	took := cost{wall: time.Since(start)}
	if cmd.ProcessState != nil {
		took.cpu = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	}
	if err != nil {
		return nil, took, fmt.Errorf("%w: %s %s", err, bytes.TrimSpace(stdout.Bytes()), bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.Bytes(), took, nil
}

// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
)

// A call describes one run of a plugin process.
type call struct {
	plugin  string
	command string
	took    time.Duration
}

// timedExec runs plugins in the same way as libcni, and measures how long each run takes.
type timedExec struct {
	invoke.RawExec
	version.PluginDecoder

	mu    sync.Mutex
	calls []call
}

// ExecPlugin runs one plugin process.
func (e *timedExec) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	start := time.Now()
	out, err := e.RawExec.ExecPlugin(ctx, path, stdin, environ)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.calls = append(e.calls, call{plugin: filepath.Base(path), command: command(environ), took: time.Since(start)})
	return out, err
}

func command(environ []string) string {
	for _, v := range environ {
		if c, ok := strings.CutPrefix(v, "CNI_COMMAND="); ok {
			return c
		}
	}
	return ""
}

// takeCalls returns the plugin calls since the last call of takeCalls.
func (e *timedExec) takeCalls() []call {
	e.mu.Lock()
	defer e.mu.Unlock()
	calls := e.calls
	e.calls = nil
	return calls
}

// A chain runs CNI operations for one conflist, in the same way as a container runtime.
type chain struct {
	list *libcni.NetworkConfigList
	raw  []byte
	cni  *libcni.CNIConfig
	exec *timedExec
}

func newChain(dir, cache string, conflist []byte) (*chain, error) {
	list, err := libcni.NetworkConfFromBytes(conflist)
	if err != nil {
		return nil, fmt.Errorf("conflist: %w", err)
	}
	exec := &timedExec{}
	return &chain{
		list: list, raw: conflist, exec: exec,
		cni: libcni.NewCNIConfigWithCacheDir([]string{dir}, cache, exec),
	}, nil
}

// plugins() returns the types of the chain's plugins, in the order in which they run.
func (c *chain) plugins() []string {
	var names []string
	for _, p := range c.list.Plugins {
		names = append(names, p.Network.Type)
	}
	return names
}

// PluginsOf returns the names of all plugin binaries that a conflist needs. The result includes the binaries of the IPAM plugins.
func PluginsOf(conflist []byte) ([]string, error) {
	list, err := libcni.NetworkConfFromBytes(conflist)
	if err != nil {
		return nil, fmt.Errorf("conflist: %w", err)
	}
	if len(list.Plugins) == 0 {
		return nil, errors.New("conflist: it names no plugins; want a list of configurations under \"plugins\"")
	}
	var names []string
	for _, p := range list.Plugins {
		names = append(names, p.Network.Type)
		if p.Network.IPAM.Type != "" {
			names = append(names, p.Network.IPAM.Type)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

func (c *chain) add(ctx context.Context, a attachment) (*types100.Result, []call, error) {
	got, err := c.cni.AddNetworkList(ctx, c.list, a.runtimeConf())
	calls := c.exec.takeCalls()
	if err != nil {
		return nil, calls, fmt.Errorf("ADD: %w", err)
	}
	result, err := types100.NewResultFromResult(got)
	return result, calls, err
}

func (c *chain) del(ctx context.Context, a attachment) ([]call, error) {
	err := c.cni.DelNetworkList(ctx, c.list, a.runtimeConf())
	if err != nil {
		err = fmt.Errorf("DEL: %w", err)
	}
	return c.exec.takeCalls(), err
}

func (c *chain) check(ctx context.Context, a attachment) error {
	err := c.cni.CheckNetworkList(ctx, c.list, a.runtimeConf())
	c.exec.takeCalls()
	if err != nil {
		return fmt.Errorf("CHECK: %w", err)
	}
	return nil
}

// An attachment contains the data that a container runtime passes to plugins about a pod and its interface.
type attachment struct {
	container string
	netns     string
	ifname    string
	podName   string
	ports     []portMapping
	limit     uint64 // bit/s in each direction; 0 for none
}

type portMapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol"`
}

// runtimeBurst is the burst that containerd sends together with every limit. This burst value means "unlimited".
const runtimeBurst = 1<<32 - 1

func (a attachment) runtimeConf() *libcni.RuntimeConf {
	capabilities := map[string]any{}
	if len(a.ports) > 0 {
		capabilities["portMappings"] = a.ports
	}
	if a.limit > 0 {
		capabilities["bandwidth"] = map[string]uint64{
			"ingressRate": a.limit, "ingressBurst": runtimeBurst,
			"egressRate": a.limit, "egressBurst": runtimeBurst,
		}
	}
	return &libcni.RuntimeConf{
		ContainerID: a.container, NetNS: a.netns, IfName: a.ifname, CapabilityArgs: capabilities,
		Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", podNamespace},
			{"K8S_POD_NAME", a.podName},
			{"K8S_POD_INFRA_CONTAINER_ID", a.container},
		},
	}
}

// coded() returns the CNI error that err wraps, if there is one.
func coded(err error) (types.Error, bool) {
	var e *types.Error
	if errors.As(err, &e) {
		return *e, true
	}
	return types.Error{}, false
}

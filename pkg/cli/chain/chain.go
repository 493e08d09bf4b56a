// SPDX-License-Identifier: Apache-2.0

// Package chain runs CNI verbs for one conflist, as a container runtime does, and records what each plugin did.
package chain

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
)

// Call is one run of a plugin process. Phases and Changes come from the debug log that a plugin writes with PODLACE_LOG=debug.
type Call struct {
	Verb    string        `json:"verb"`
	Plugin  string        `json:"plugin"`
	Took    time.Duration `json:"took"` // nanoseconds
	Phases  []Phase       `json:"phases,omitempty"`
	Changes []Change      `json:"changes,omitempty"`
	Error   string        `json:"error,omitempty"`
	Err     error         `json:"-"` // of which Error is the text
}

// recordingExec runs plugins as libcni does, and calls show after each.
type recordingExec struct {
	version.PluginDecoder
	show func(Call)
}

// ExecPlugin implements invoke.Exec.
func (e *recordingExec) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	var log bytes.Buffer
	began := time.Now()
	out, err := (&invoke.RawExec{Stderr: &log}).ExecPlugin(ctx, path, stdin, environ)
	ended := time.Now()
	c := Call{Verb: verbOf(environ), Plugin: filepath.Base(path), Took: ended.Sub(began)}
	c.Phases, c.Changes = readLog(log.String(), began, ended)
	if c.Err = err; err != nil {
		c.Error = err.Error()
	}
	if c.Verb != "VERSION" {
		e.show(c)
	}
	return out, err
}

// FindInPath implements invoke.Exec.
func (*recordingExec) FindInPath(plugin string, paths []string) (string, error) {
	return invoke.FindInPath(plugin, paths)
}

func verbOf(environ []string) string {
	for _, v := range environ {
		if c, ok := strings.CutPrefix(v, "CNI_COMMAND="); ok {
			return c
		}
	}
	return ""
}

// List is the configuration of a network.
type List = libcni.NetworkConfigList

// Chain runs the plugins of one conflist.
type Chain struct {
	List *List

	cni *libcni.CNIConfig
}

// New returns a chain with the plugins of a folder. libcni keeps the results of ADD below `cache`, and each run of a plugin is passed to
// show.
func New(plugins, cache string, list *List, show func(Call)) *Chain {
	return &Chain{List: list, cni: libcni.NewCNIConfigWithCacheDir([]string{plugins}, cache, &recordingExec{show: show})}
}

// Provides reports whether a plugin of the chain has a capability, such as "portMappings".
func (c *Chain) Provides(capability string) bool {
	return slices.ContainsFunc(c.List.Plugins, func(p *libcni.PluginConfig) bool { return p.Network.Capabilities[capability] })
}

// PluginsOf returns all plugin binaries that a network needs, with those for IPAM.
func PluginsOf(list *List) (names []string) {
	for _, p := range list.Plugins {
		names = append(names, p.Network.Type)
		if p.Network.IPAM.Type != "" {
			names = append(names, p.Network.IPAM.Type)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// CheckPlugins returns an error if a folder lacks any of the named plugin binaries.
func CheckPlugins(dir string, names []string) error {
	var missing []string
	for _, name := range names {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("plugin folder %s: no executable %s", dir, strings.Join(missing, ", "))
	}
	return nil
}

// Add runs ADD of all plugins.
func (c *Chain) Add(ctx context.Context, a Attachment) (*types100.Result, error) {
	got, err := c.cni.AddNetworkList(ctx, c.List, a.runtimeConf())
	if err != nil {
		return nil, fmt.Errorf("ADD: %w", err)
	}
	return types100.NewResultFromResult(got)
}

// Check runs CHECK of all plugins.
func (c *Chain) Check(ctx context.Context, a Attachment) error {
	if err := c.cni.CheckNetworkList(ctx, c.List, a.runtimeConf()); err != nil {
		return fmt.Errorf("CHECK: %w", err)
	}
	return nil
}

// Del runs DEL of all plugins until one fails, as a runtime does.
func (c *Chain) Del(ctx context.Context, a Attachment) error {
	if err := c.cni.DelNetworkList(ctx, c.List, a.runtimeConf()); err != nil {
		return fmt.Errorf("DEL: %w", err)
	}
	return nil
}

// DelEach runs DEL of every plugin even if one fails, so that nothing of the pod stays.
func (c *Chain) DelEach(ctx context.Context, a Attachment) {
	for _, p := range slices.Backward(c.List.Plugins) {
		config, err := libcni.InjectConf(p, map[string]any{"name": c.List.Name, "cniVersion": c.List.CNIVersion})
		if err == nil {
			_ = c.cni.DelNetwork(ctx, config, a.runtimeConf())
		}
	}
}

// Attachment is what a container runtime tells plugins about a pod and its interface.
type Attachment struct {
	ContainerID  string
	Netns        string
	IfName       string
	PodNamespace string
	PodName      string
	Ports        []PortMapping
	Limit        uint64 // bit/s in each direction; 0 for none
}

// PortMapping is a hostPort of an attachment.
type PortMapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol"`
}

// runtimeBurst is the burst that containerd sends with every limit; it means "unlimited".
const runtimeBurst = 1<<32 - 1

func (a Attachment) runtimeConf() *libcni.RuntimeConf {
	capabilities := map[string]any{}
	if len(a.Ports) > 0 {
		capabilities["portMappings"] = a.Ports
	}
	if a.Limit > 0 {
		capabilities["bandwidth"] = map[string]uint64{
			"ingressRate": a.Limit, "ingressBurst": runtimeBurst,
			"egressRate": a.Limit, "egressBurst": runtimeBurst,
		}
	}
	return &libcni.RuntimeConf{
		ContainerID: a.ContainerID, NetNS: a.Netns, IfName: a.IfName, CapabilityArgs: capabilities,
		Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", a.PodNamespace},
			{"K8S_POD_NAME", a.PodName},
			{"K8S_POD_INFRA_CONTAINER_ID", a.ContainerID},
		},
	}
}

// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containernetworking/cni/libcni"
)

// CheckOptions identifies the attachment of a running pod that TraceChecks checks.
type CheckOptions struct {
	Plugins string // folder with the plugin binaries
	Cache   string // libcni's folder, in which runtimes keep the configuration and the result of each ADD

	Network, ContainerID, IfName, Netns string
}

// ErrNotCached means that libcni's cache folder does not contain the attachment.
var ErrNotCached = errors.New("the runtime's record of the ADD is missing")

// TraceChecks runs CHECK of each plugin of an attachment, with the configuration, arguments and result of the ADD. TraceChecks calls show()
// after each plugin, and continues if a plugin's CHECK fails. Errors of CHECK itself are passed to show() and not returned.
func TraceChecks(ctx context.Context, o CheckOptions, show func(Traced)) error {
	if err := os.Setenv("PODLACE_LOG", "debug"); err != nil { // the plugins inherit this variable and log each change
		return err
	}
	cni := libcni.NewCNIConfigWithCacheDir([]string{o.Plugins}, o.Cache, nil)
	text, rt, err := cni.GetNetworkListCachedConfig(&libcni.NetworkConfigList{Name: o.Network},
		&libcni.RuntimeConf{ContainerID: o.ContainerID, IfName: o.IfName, NetNS: o.Netns})
	if err != nil {
		return err
	}
	if text == nil {
		return fmt.Errorf("%w: %s has no %s-%s-%s", ErrNotCached, filepath.Join(o.Cache, "results"), o.Network, o.ContainerID, o.IfName)
	}
	list, err := libcni.NetworkConfFromBytes(text)
	if err != nil {
		return fmt.Errorf("the configuration of the ADD: %w", err)
	}
	for _, p := range list.Plugins {
		traceCheck(ctx, o, list, p, rt, show)
	}
	return nil
}

// traceCheck runs CHECK of a single plugin.
func traceCheck(ctx context.Context, o CheckOptions, list *libcni.NetworkConfigList, p *libcni.PluginConfig, rt *libcni.RuntimeConf,
	show func(Traced)) {
	shown := false
	cni := libcni.NewCNIConfigWithCacheDir([]string{o.Plugins}, o.Cache, &tracingExec{show: func(t Traced) {
		shown = true
		show(t)
	}})
	config, err := libcni.InjectConf(p, map[string]any{"name": list.Name, "cniVersion": list.CNIVersion})
	if err == nil {
		err = cni.CheckNetwork(ctx, config, rt)
	}
	if err != nil && !shown { // the plugin did not run
		show(Traced{Verb: "CHECK", Plugin: p.Network.Type, Error: err.Error()})
	}
}

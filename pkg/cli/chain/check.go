// SPDX-License-Identifier: Apache-2.0

package chain

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/version"
)

// Recorded identifies the attachment of a running pod in libcni's cache.
type Recorded struct {
	Plugins string // folder with the plugin binaries
	Cache   string // libcni's folder, in which runtimes keep the configuration and the result of each ADD

	Network, ContainerID, IfName, Netns string
}

// Check runs CHECK of each plugin with the configuration, arguments and result of the ADD, even if one fails, and calls show after each.
// The error says that none could run. If only is not nil, it selects the plugins, and disableCheck is obeyed.
func (r Recorded) Check(ctx context.Context, only func(plugin string) bool, show func(Call)) error {
	cni := libcni.NewCNIConfigWithCacheDir([]string{r.Plugins}, r.Cache, nil)
	text, rt, err := cni.GetNetworkListCachedConfig(&libcni.NetworkConfigList{Name: r.Network},
		&libcni.RuntimeConf{ContainerID: r.ContainerID, IfName: r.IfName, NetNS: r.Netns})
	if err != nil {
		return err
	}
	if text == nil {
		return fmt.Errorf("the runtime's record of the ADD is missing: %s has no %s-%s-%s", filepath.Join(r.Cache, "results"),
			r.Network, r.ContainerID, r.IfName)
	}
	list, err := libcni.NetworkConfFromBytes(text)
	if err != nil {
		return fmt.Errorf("the configuration of the ADD: %w", err)
	}
	switch has, err := version.GreaterThanOrEqualTo(list.CNIVersion, "0.4.0"); {
	case only == nil:
	case list.DisableCheck:
		return errors.New("the configuration has disableCheck")
	case err != nil || !has:
		return fmt.Errorf("cniVersion %q has no CHECK", list.CNIVersion)
	}
	for _, p := range list.Plugins {
		if only == nil || only(p.Network.Type) {
			r.checkOne(ctx, list, p, rt, show)
		}
	}
	return nil
}

// checkOne runs CHECK of a single plugin.
func (r Recorded) checkOne(ctx context.Context, list *libcni.NetworkConfigList, p *libcni.PluginConfig, rt *libcni.RuntimeConf,
	show func(Call)) {
	shown := false
	cni := libcni.NewCNIConfigWithCacheDir([]string{r.Plugins}, r.Cache, &recordingExec{show: func(c Call) {
		shown = true
		show(c)
	}})
	config, err := libcni.InjectConf(p, map[string]any{"name": list.Name, "cniVersion": list.CNIVersion})
	if err == nil {
		err = cni.CheckNetwork(ctx, config, rt)
	}
	if err != nil && !shown { // the plugin did not run
		show(Call{Verb: "CHECK", Plugin: p.Network.Type, Error: err.Error(), Err: err})
	}
}

// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// checkListeners tells of ports that processes of the node listen on, which nobody would reach there any more: an error if the
// configuration wants that, else a warning.
func (c Config) checkListeners(r *plugin.Request, ports []kernel.HostPort) error {
	used, err := kernel.Listening(ports)
	if err != nil {
		err = fmt.Errorf("look for processes that listen on a hostPort: %w", err)
	} else if len(used) > 0 {
		err = listenersError(used)
	}
	if err != nil && !c.RefuseListeners {
		r.Log.Warn(err.Error())
		return nil
	}
	return err
}

// listenersError names each port once, whatever its families are.
func listenersError(used []kernel.HostPort) error {
	var names []string
	for _, p := range used {
		if name := p.String(); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	option := map[string]string{"tcp": "-lntp", "udp": "-lnup"}[used[0].Protocol]
	return plugin.WithHint(plugin.Errorf(plugin.CodePortConflict, "hostPort %s: a process of the node listens there", strings.Join(names, ", ")),
		"ss %s 'sport = :%d' shows it", option, used[0].Port)
}

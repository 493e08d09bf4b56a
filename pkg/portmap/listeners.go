// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"
	"net/netip"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// checkListeners tells of ports that processes of the node listen on, which nobody would reach there any more: in an error if the
// configuration wants that, else in a warning.
func (c Config) checkListeners(r *plugin.Request, wanted []ports.Port) error {
	used, err := listening(ports.Singles(wanted))
	switch {
	case err != nil && c.RefuseListeners:
		return fmt.Errorf("look for processes that listen on a hostPort: %w", err)
	case err != nil:
		r.Log.Warn("it is not known whether processes of the node listen on the hostPorts", "error", err)
		return nil
	case len(used) == 0:
		return nil
	}
	list := ports.Names(used)
	option := map[string]string{"tcp": "-lntp", "udp": "-lnup"}[used[0].Protocol]
	hint := fmt.Sprintf("ss %s 'sport = :%d' shows it", option, used[0].Port)
	if !c.RefuseListeners {
		r.Log.Warn("a process of the node listens on a hostPort, which leads to the pod from now on", "ports", list, "hint", hint)
		return nil
	}
	return plugin.WithHint(plugin.Errorf(plugin.CodePortConflict, "hostPort %s: a process of the node listens there", list), "%s", hint)
}

// checkHostIPs refuses the broadcast address of a network of the node, and warns of an address that the node has not: it may be one that
// comes later, as those of keepalived do.
func checkHostIPs(r *plugin.Request, host *kernel.Node, wanted []ports.Port) error {
	asked := map[netip.Addr]bool{}
	for _, p := range wanted {
		if !p.HostIP.IsValid() || asked[p.HostIP] {
			continue
		}
		asked[p.HostIP] = true
		own, broadcast := host.IsOwn(p.HostIP)
		if broadcast {
			return plugin.Errorf(plugin.CodeConfig, "hostIP %s: want the address of an interface, not the broadcast address of its network",
				p.HostIP)
		}
		if !own {
			r.Log.Warn("the node has not the address of a hostPort, which nobody reaches until it has", "port", p.String())
		}
	}
	return nil
}

// manyPorts is how many ports take as long to bind as the tables of sockets to read.
const manyPorts = 32

// listening returns those of the ports that a process of the node listens on, by TCP or UDP: forwarded, they never reach it again. SCTP
// is not looked at.
func listening(wanted []ports.Port) (used []ports.Port, err error) {
	tables := map[string]kernel.Sockets{}
	listens := func(p ports.Port) bool {
		if tables[p.Protocol] == nil {
			tables[p.Protocol] = kernel.ReadSockets(p.Number())
		}
		return tables[p.Protocol].Listen(p.Port)
	}
	for _, p := range wanted {
		if p.Protocol == "sctp" || len(wanted) > manyPorts && !listens(p) {
			continue
		}
		bound, err := kernel.IsBound(p.Number(), netip.AddrPortFrom(p.Address(), p.Port))
		if err != nil {
			return nil, fmt.Errorf("bind %s: %w", p, err)
		}
		// A connection of the node's own that happens to leave from the port takes it as well.
		if bound && listens(p) {
			used = append(used, p)
		}
	}
	return used, nil
}

// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"
	"net/netip"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// checkListeners reports ports on which processes of the node listen. Clients would no longer reach those processes. It returns an error if
// the configuration asks for that, otherwise it logs a warning.
func (c Config) checkListeners(r *plugin.Request, wanted []ports.Port) error {
	used, err := listening(ports.Singles(wanted))
	switch {
	case err != nil && c.RefuseListeners:
		return fmt.Errorf("look for processes that listen on a hostPort: %w", err)
	case err != nil:
		r.Log.Warn("cannot check whether processes of the node listen on the hostPorts", "error", err)
		return nil
	case len(used) == 0:
		return nil
	}
	list := ports.Names(used)
	option := map[string]string{"tcp": "-lntp", "udp": "-lnup"}[used[0].Protocol]
	hint := fmt.Sprintf("ss %s 'sport = :%d' shows it", option, used[0].Port)
	if !c.RefuseListeners {
		r.Log.Warn("a process of the node listens on a hostPort; from now on the port leads to the pod", "ports", list, "hint", hint)
		return nil
	}
	return plugin.WithHint(plugin.Errorf(plugin.CodePortConflict, "hostPort %s: a process of the node listens there", list), "%s", hint)
}

// checkHostIPs refuses the broadcast address of a node's network. It warns about an address that the node does not have: the node may get
// it later, such as one of keepalived.
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
			r.Log.Warn("hostIP is not assigned to this node; the port is unreachable until it is", "port", p.String())
		}
	}
	return nil
}

// manyPorts is the number of ports at which binding each takes as long as reading the socket tables.
const manyPorts = 32

// listening returns the ports on which a process of the node listens by TCP or UDP. After forwarding, their packets no longer reach that
// process. It does not check SCTP.
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
		// An outgoing connection of the node may use the port, so a bound port alone proves nothing.
		if bound && listens(p) {
			used = append(used, p)
		}
	}
	return used, nil
}

// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"
	"net/netip"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// checkListeners finds processes of the node that clients could no longer reach, because they listen on a port that is to be forwarded.
// That is an error with refuseHostListeners, otherwise a warning.
func (c Config) checkListeners(r *plugin.Request, wanted []ports.Port) error {
	used, err := listeningPorts(ports.Singles(wanted))
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
		r.Log.Warn("a process listens on a hostPort; from now on it leads to the pod, unless Docker publishes it", "ports", list, "hint", hint)
		return nil
	}
	return plugin.WithHint(plugin.Errorf(plugin.CodePortConflict, "hostPort %s: a process of the node listens there", list), "%s", hint)
}

// checkHostIPs fails for a hostIP that is a broadcast address of the node. If no interface has the hostIP, it only warns, because the node
// may get it later, for example from keepalived.
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

// manyPorts is the largest number of ports for which binding each is faster than reading the socket tables first.
const manyPorts = 32

// listeningPorts returns the ports on which a process of the node listens with TCP or UDP; SCTP is not checked.
func listeningPorts(wanted []ports.Port) (used []ports.Port, err error) {
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
		// A bound port may also belong to an outgoing connection.
		if bound && listens(p) {
			used = append(used, p)
		}
	}
	return used, nil
}

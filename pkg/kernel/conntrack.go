// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// DelFlows removes the connection tracking entries of the UDP ports among ports: a client that keeps sending from one port would
// otherwise stay with the pod that had the port before, or with none. One walk of the table for each family, none without UDP ports.
func (n *Node) DelFlows(ports []HostPort) error {
	filters := map[netlink.InetFamily][]netlink.CustomConntrackFilter{}
	var local map[netip.Addr]bool
	for _, p := range ports {
		if p.Protocol == "udp" {
			if local == nil {
				var err error
				if local, err = n.localAddresses(); err != nil {
					return err
				}
			}
			family := netlink.InetFamily(unix.AF_INET)
			if p.To.Addr().Is6() {
				family = unix.AF_INET6
			}
			filters[family] = append(filters[family], udpFlow{p, local})
		}
	}
	for family, list := range filters {
		err := change("conntrack delete stale udp entries", func() error {
			_, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, family, list...)
			return ignore(err, unix.ENOENT)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (n *NS) localAddresses() (map[netip.Addr]bool, error) {
	var list []netlink.Addr
	err := retry(func() (err error) {
		list, err = n.h.AddrList(nil, netlink.FAMILY_ALL)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("addr show: %w", err)
	}
	local := map[netip.Addr]bool{}
	for _, a := range list {
		if addr, ok := netip.AddrFromSlice(a.IP); ok {
			local[addr.Unmap()] = true
		}
	}
	return local, nil
}

// udpFlow matches entries whose first packet went to the mapped port of the node: those that were not translated when the port was
// not mapped yet, and those that lead to the pod.
type udpFlow struct {
	HostPort
	local map[netip.Addr]bool
}

// MatchConntrackFlow tells whether the entry belongs to the port.
func (p udpFlow) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	if flow.Forward.Protocol != unix.IPPROTO_UDP || flow.Forward.DstPort != p.Port {
		return false
	}
	dst, _ := netip.AddrFromSlice(flow.Forward.DstIP)
	if p.HostIP.IsValid() && dst.Unmap() != p.HostIP || !p.local[dst.Unmap()] {
		return false
	}
	from, _ := netip.AddrFromSlice(flow.Reverse.SrcIP)
	untouched := flow.Reverse.SrcIP.Equal(flow.Forward.DstIP) && flow.Reverse.SrcPort == flow.Forward.DstPort
	return untouched || from.Unmap() == p.To.Addr()
}

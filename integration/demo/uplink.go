// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/netip"
	"os"

	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/kernel"
)

const (
	nodeSide   = "uplink0"
	clientSide = "eth0"
)

// nodePrefixes returns the subnets between node and client. They are reserved for documentation, so no real network uses them.
func nodePrefixes() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("2001:db8:2::1/64")}
}

func clientPrefixes() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("192.0.2.2/24"), netip.MustParsePrefix("2001:db8:2::2/64")}
}

func nodeV4() netip.Addr   { return nodePrefixes()[0].Addr() }
func nodeV6() netip.Addr   { return nodePrefixes()[1].Addr() }
func clientV4() netip.Addr { return clientPrefixes()[0].Addr() }
func clientV6() netip.Addr { return clientPrefixes()[1].Addr() }

// connect joins the client to the node by a veth pair. Like a neighbour of a real node, it has a route to the node but none to the pods.
func connect(client *sandbox.Pod, ipv6 bool) error {
	file, err := os.Open(client.Path)
	if err != nil {
		return err
	}
	defer file.Close()
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	outside, err := kernel.Open(file)
	if err != nil {
		return err
	}
	defer outside.Close()
	if _, err := host.AddVeth(kernel.Veth{Host: nodeSide, Pod: clientSide, Netns: file}); err != nil {
		return err
	}
	if err := configure(outside, clientSide, clientPrefixes(), ipv6); err != nil {
		return err
	}
	return configure(&host.NS, nodeSide, nodePrefixes(), ipv6)
}

// disconnect deletes the link to the client, which would otherwise stay until the kernel has deleted the client's namespace.
func disconnect() error {
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	return host.DelLink(nodeSide)
}

func configure(n *kernel.NS, name string, prefixes []netip.Prefix, ipv6 bool) error {
	link, ok, err := n.Link(name)
	if err != nil {
		return err
	}
	if !ok {
		return fmt.Errorf("%s is gone", name)
	}
	if err := n.SetUp(link); err != nil {
		return err
	}
	for _, p := range prefixes {
		if p.Addr().Is6() && !ipv6 {
			continue
		}
		if err := n.AddAddress(link, p, false); err != nil {
			return err
		}
	}
	return nil
}

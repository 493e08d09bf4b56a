// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"log/slog"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// isHostSide reports whether a link with the name of an attachment's host side is that host side: it is a veth that has the recorded
// ifindex, leads a device group, or has the MAC that ADD computes from the key. Any other link of that name is another program's. index is
// 0 if it is not recorded.
func isHostSide(link kernel.Link, key attachment.Key, index int) bool {
	return link.Kind == "veth" && (link.Index == index || link.LeadsGroup() || hasMAC(link, key))
}

func hasMAC(link kernel.Link, key attachment.Key) bool { return bytes.Equal(link.MAC, key.MAC("host")) }

// delHostSide deletes the veth pair of an attachment and the devices that serve it. It finds a renamed one by its ifindex and MAC.
func delHostSide(host *kernel.Node, key attachment.Key, index int) error {
	link, ok, err := host.Link(key.HostVeth())
	if err != nil {
		return err
	}
	if ok && isHostSide(link, key, index) {
		return host.DelGroup(link)
	}
	if ok {
		slog.Warn("a link with the name of this attachment's host side is left alone: another program made it", "link", link.Name)
	}
	link, live, err := host.LinkByIndex(index)
	switch {
	case err != nil:
		return err
	case !live:
		link = kernel.Link{Name: key.HostVeth(), Index: index}
	case link.Kind != "veth" || !hasMAC(link, key):
		link = kernel.Link{Name: key.HostVeth()} // the ifindex is another link's by now
	}
	return host.DelGroup(link)
}

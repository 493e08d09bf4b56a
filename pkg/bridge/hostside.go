// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"log/slog"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// isHostSide reports whether a link with the name of an attachment's host side is that host side. It is a veth, and it has the recorded
// ifindex, leads a device group, or has the MAC that ADD computes from the key. Otherwise another program made the link. index is 0 if none
// is recorded.
func isHostSide(link kernel.Link, key attachment.Key, index int) bool {
	return link.Kind == "veth" && (link.Index == index || link.LeadsGroup() || hasMAC(link, key))
}

func hasMAC(link kernel.Link, key attachment.Key) bool { return bytes.Equal(link.MAC, key.MAC("host")) }

// delHostSide deletes the veth pair of an attachment and the devices in its group. It finds a renamed pair by its ifindex and MAC.
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
		link = kernel.Link{Name: key.HostVeth()} // the kernel reused the ifindex for another link
	}
	return host.DelGroup(link)
}

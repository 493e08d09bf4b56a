// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"log/slog"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// isHostSide reports whether a link is the host side of an attachment, and not another program's link with the same name. The link must be
// a veth. In addition, the link must have the recorded ifindex, or have the MAC that ADD computes from the attachment's key, or lead a
// device group (kernel.Link.LeadsGroup). The argument `index` is the recorded ifindex, or 0 if no ifindex was recorded.
func isHostSide(link kernel.Link, key attachment.Key, index int) bool {
	return link.Kind == "veth" && (link.Index == index || link.LeadsGroup() || hasMAC(link, key))
}

func hasMAC(link kernel.Link, key attachment.Key) bool { return bytes.Equal(link.MAC, key.MAC("host")) }

// delHostSide deletes the veth pair of an attachment, and all other links in the pair's device group. If the pair was renamed, delHostSide
// finds it by ifindex and MAC.
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

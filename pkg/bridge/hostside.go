// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"errors"
	"log/slog"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/kernel"
)

// isHostSide reports whether a link is the host side of an attachment and not another program's with the same name. It must be a veth that
// has the recorded ifindex (0 if there is none) or the MAC that ADD computes from the key, or leads a device group
// (kernel.Link.LeadsGroup).
func isHostSide(link kernel.Link, key attachment.Key, index int) bool {
	return link.Kind == "veth" && (link.Index == index || link.LeadsGroup() || hasMAC(link, key))
}

func hasMAC(link kernel.Link, key attachment.Key) bool { return bytes.Equal(link.MAC, key.MAC("host")) }

// removeHostSide sets the veth pair of an attachment down, calls removeRules, and deletes the pair with its device group. No frame of the
// pod passes without rules, because the link is down; if it cannot be set down, the rules stay. The deletion comes last, because it waits
// for RCU grace periods, and those of the rules pass meanwhile.
func removeHostSide(host *kernel.Node, key attachment.Key, index int, removeRules func() error) error {
	link, err := findHostSide(host, key, index)
	if err != nil {
		return err
	}
	if link.Kind != "" {
		err = fault.Ignore(host.SetDown(link), unix.ENODEV)
	}
	if err == nil {
		err = removeRules()
	}
	return errors.Join(err, host.DelGroup(link))
}

// findHostSide returns the host side of an attachment, which it finds by ifindex and MAC if it was renamed. If the pair is gone, the
// result's Kind is empty, and DelGroup needs its Index to delete what remains of the pair's device group.
func findHostSide(host *kernel.Node, key attachment.Key, index int) (link kernel.Link, err error) {
	link, ok, err := host.Link(key.HostVeth())
	if err != nil || ok && isHostSide(link, key, index) {
		return link, err
	}
	if ok {
		slog.Warn("a link with the name of this attachment's host side is left alone: another program made it", "link", link.Name)
	}
	link, live, err := host.LinkByIndex(index)
	switch {
	case err != nil:
		return link, err
	case !live:
		return kernel.Link{Name: key.HostVeth(), Index: index}, nil
	case link.Kind != "veth" || !hasMAC(link, key): // the kernel reused the ifindex for another link
		return kernel.Link{Name: key.HostVeth()}, nil
	}
	return link, nil
}

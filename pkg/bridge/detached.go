// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"log/slog"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// DetachedPort is the host-side veth of a live attachment that is missing, is not a port of the recorded bridge, or whose bridge is down.
type DetachedPort struct {
	Record    attachment.Record
	Interface string
	Bridge    string // the recorded bridge
	Missing   bool   // the node has no bridge with that name
	Down      bool   // the bridge is down, with the veth as its port
	Deleted   bool   // the node has no such veth
	Master    string // bridge that the host side is attached to now, or ""
}

// DetachedPorts returns the host-side veths that another program deleted or detached from their bridge, and those of a bridge that is down.
// It ignores attachments whose ADD is unfinished or whose pod is gone.
func DetachedPorts(host *kernel.Node) (found []DetachedPort, err error) {
	pods, err := attachment.States[state](attachment.AllOf("bridge"))
	errs := []error{err}
	for _, pod := range finished(pods) {
		link, ok, err := recordedPort(host, pod)
		if err != nil || plugin.NetnsGone(pod.Netns) {
			errs = append(errs, err)
			continue
		}
		if !ok {
			found = append(found, DetachedPort{Record: pod.Record, Interface: pod.HostVeth(), Bridge: pod.State.Bridge, Deleted: true})
			continue
		}
		bridge, isThere, err := host.Link(pod.State.Bridge)
		if err != nil || isThere && bridge.Up && link.Master == bridge.Index {
			errs = append(errs, err)
			continue
		}
		master, _, err := host.LinkByIndex(link.Master)
		errs = append(errs, err)
		found = append(found, DetachedPort{Record: pod.Record, Interface: link.Name, Bridge: pod.State.Bridge, Missing: !isThere,
			Down: isThere && link.Master == bridge.Index, Master: master.Name})
	}
	return found, errors.Join(errs...)
}

// UnrecordedPorts returns the bridges' ports that have a name of Podlace's but no record, readable or not, for example because another
// program deleted /run/podlace.
func UnrecordedPorts(host *kernel.Node) (names []string, err error) {
	ports, err := host.Ports(kernel.Link{})
	if err != nil {
		return nil, err
	}
	records, damaged, err := attachment.Scan()
	recorded := map[string]bool{}
	for _, rec := range records {
		recorded[rec.Plugin+rec.HostVeth()] = true
	}
	for _, d := range damaged {
		_, hash, _ := strings.Cut(d.Name, "-")
		recorded[d.Plugin()+attachment.HostVeth(hash)] = true
	}
	for _, name := range ports {
		if !isVeth(name, ownDigits) || recorded["bridge"+name] {
			continue
		}
		if _, ok, err := host.Link(name); ok || err != nil { // DEL may have removed link and record meanwhile
			names = append(names, name)
		}
	}
	return names, err
}

// recordedPort returns the host-side veth of an attachment. ok is false if it is gone or its ifindex belongs to another link.
func recordedPort(host *kernel.Node, pod attachment.Of[state]) (link kernel.Link, ok bool, err error) {
	link, ok, err = host.LinkByIndex(pod.State.Index)
	return link, ok && link.Name == pod.HostVeth(), err
}

// restoreDetached attaches a host-side veth without a bridge to the recorded one, or does nothing if that is missing.
func restoreDetached(host *kernel.Node, log *slog.Logger, link kernel.Link, st state) error {
	bridge, ok, err := host.Link(st.Bridge)
	if err != nil || !ok || bridge.Kind != "bridge" {
		return err
	}
	log.Warn("a pod's port has no bridge and is attached again", "port", link.Name, "bridge", bridge.Name)
	return fault.Ignore(restorePort(host, bridge, link, st), unix.ENODEV) // a DEL in the meantime
}

// restorePort attaches a host-side veth to a bridge, with the recorded VLANs and flags.
func restorePort(host *kernel.Node, bridge, link kernel.Link, st state) error {
	if st.VLANs.used() && !bridge.FiltersVLANs {
		return plugin.Errorf(plugin.CodeDevice, "bridge %s does not keep VLANs apart: %s is not attached", bridge.Name, link.Name)
	}
	errs := []error{host.SetMaster(link, bridge), setPort(host, bridge, link, st.VLANs, st.flags())}
	if st.Guard.checksSources() {
		errs = append(errs, host.SetReserved(link))
	}
	if !link.Up {
		errs = append(errs, host.SetUp(link))
	}
	return errors.Join(errs...)
}

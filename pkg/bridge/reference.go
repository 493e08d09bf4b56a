// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"net/netip"
	"slices"
	"strings"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/reference"
)

// delUnrecorded is DEL for an attachment without a record: the reference plugin made it, or the record was lost. Most names follow from the
// attachment's key. The reference plugin's veth pair has a random name, so it is deleted only if provenPodSide finds that it belongs to
// this attachment.
func (b bridge) delUnrecorded(r *plugin.Request, host *kernel.Node) error {
	key := attachment.KeyOf(r)
	// Podlace's veth pair goes first, with the other links of its device group, which could not be found without it.
	err := errors.Join(removeHostSide(host, key, 0, func() error { return delGuardOf(host, key.HostVeth()) }), deleteProven(r, host),
		asReference(key).Remove())
	if object := ipam.Object(r.Config); err == nil && ipam.ValidType(ipam.Type(object)) == nil {
		// The addresses are released last, because this pod's masquerade rules could match packets of the next pod with the same address.
		err = b.releaseAddresses(r, object)
	}
	return err
}

// delSuccessor handles a container that the reference plugin attached again after Podlace: the record exists, but its link is gone. It does
// nothing if prevResult names Podlace's link, because then the reference plugin has not attached the container again.
func delSuccessor(r *plugin.Request, host *kernel.Node) error {
	key := attachment.KeyOf(r)
	if r.Prev != nil && namedInPrevResult(r, key.HostVeth()) {
		return nil
	}
	if _, ok, err := host.Link(key.HostVeth()); ok || err != nil {
		return err
	}
	return errors.Join(deleteProven(r, host), asReference(key).Remove())
}

func asReference(key attachment.Key) reference.Bridge {
	return reference.Bridge(reference.Unrecorded(key, "bridge"))
}

// deleteProven deletes the reference plugin's veth pair in the pod's namespace, or on the node if the namespace is unknown.
func deleteProven(r *plugin.Request, host *kernel.Node) error {
	if r.Netns == nil {
		return deleteHostSide(r, host)
	}
	pod, err := attachment.Pod(r)
	if err != nil {
		return err
	}
	link, ok, err := pod.Link(r.IfName)
	if err != nil || !ok {
		return err
	}
	side, ok, err := provenPodSide(r, host, link)
	switch {
	case ok && side.LeadsGroup(): // Podlace's veth under another name
		return host.DelGroup(side)
	case ok:
		return pod.DelLink(r.IfName)
	}
	return err
}

// The number of hexadecimal digits in a host side's name tells who made it: Podlace (attachment.HostVeth) or the reference plugin.
const (
	ownDigits       = 11
	referenceDigits = 8
)

func isVeth(name string, digits int) bool {
	hash, ok := strings.CutPrefix(name, "veth")
	return ok && len(hash) == digits && strings.Trim(hash, "0123456789abcdef") == ""
}

// isOtherAttachment reports whether the name of a host side, which contains a hash of the attachment's key, is that of another attachment
// than r's. The MAC in prevResult is no proof: it is computed from the address, so a pod of another network with the same address has it
// too.
func isOtherAttachment(r *plugin.Request, name string) bool {
	return isVeth(name, ownDigits) && name != attachment.KeyOf(r).HostVeth()
}

// provenPodSide reports whether the pod's interface belongs to this attachment, because prevResult contains its name and MAC. Runtimes pass
// no prevResult before cniVersion 0.4.0; then the host side must be on the configured bridge and have a name of the reference plugin's
// format. side is the host side, if it exists.
func provenPodSide(r *plugin.Request, host *kernel.Node, link kernel.Link) (side kernel.Link, ok bool, err error) {
	side, ok, err = host.PeerOf(link, r.Netns)
	if err != nil {
		return side, false, err
	}
	ok = ok && link.Kind == "veth"
	if ok && isOtherAttachment(r, side.Name) {
		return side, false, nil
	}
	if r.Prev != nil {
		return side, slices.ContainsFunc(r.Prev.Interfaces, func(i *types100.Interface) bool {
			return i.Name == r.IfName && i.Sandbox != "" && i.Mac == link.MAC.String()
		}), nil
	}
	if !ok || !isVeth(side.Name, referenceDigits) || side.LeadsGroup() {
		return side, false, nil
	}
	bridge, ok, err := host.LinkByIndex(side.Master)
	return side, ok && bridge.Kind == "bridge" && bridge.Name == NameIn(r.Config), err
}

// NameIn returns the name of the bridge in a configuration, whose other parts may be invalid.
func NameIn(config []byte) string { return ipam.BridgeIn(config) }

// deleteHostSide deletes the reference plugin's veth pair on the node, if the pod's namespace is unknown but may still exist. prevResult
// must contain the name and MAC of the host side, and its bridge. This spares the veth pair of a VLAN's gateway, which pods share, because
// the gateway's end is not a bridge port.
func deleteHostSide(r *plugin.Request, host *kernel.Node) error {
	if r.Prev == nil {
		return nil
	}
	for _, i := range r.Prev.Interfaces {
		if i.Sandbox != "" || i.Mac == "" || isOtherAttachment(r, i.Name) {
			continue
		}
		link, ok, err := host.Link(i.Name)
		if err != nil {
			return err
		}
		if !ok || link.Kind != "veth" || link.Master == 0 || i.Mac != link.MAC.String() {
			continue
		}
		bridge, ok, err := host.LinkByIndex(link.Master)
		if err != nil {
			return err
		}
		if ok && namedInPrevResult(r, bridge.Name) {
			return host.DelLink(link.Name)
		}
	}
	return nil
}

// namedInPrevResult reports whether prevResult contains an interface on the node with this name.
func namedInPrevResult(r *plugin.Request, name string) bool {
	for _, i := range r.Prev.Interfaces {
		if i.Name == name && i.Sandbox == "" {
			return true
		}
	}
	return false
}

// masqueradedByReference reports whether the attachment has no record and the reference plugin's rules masquerade all addresses.
func (j *job) masqueradedByReference(addresses []netip.Prefix) (bool, error) {
	if attachment.Recorded(j.r) {
		return false, nil
	}
	var err error
	missing := slices.ContainsFunc(addresses, func(a netip.Prefix) bool {
		ok, e := asReference(j.att.Key).HasMasquerade(a.Addr())
		err = errors.Join(err, e)
		return !ok
	})
	return !missing, err
}

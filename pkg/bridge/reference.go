// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
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

// delUnrecorded implements DEL for an attachment without a record. Either the reference plugin made the attachment, or the record was lost.
// Most objects have names that are computed from the attachment's key. The name of the reference plugin's veth pair is random. Therefore,
// the reference plugin's pair is deleted only if provenPodSide reports that the pair belongs to this attachment.
func (b bridge) delUnrecorded(r *plugin.Request, host *kernel.Node) error {
	key := attachment.KeyOf(r)
	// Podlace's veth pair is deleted first, together with all other links in its device group. If another step deleted the pair first, DEL
	// could not find the other links of the group.
	err := errors.Join(removeHostSide(host, key, 0, func() error { return delGuardOf(host, key.HostVeth()) }), deleteProven(r, host),
		asReference(key).Remove())
	if object := ipam.Object(r.Config); err == nil && ipam.ValidType(ipam.Type(object)) == nil {
		// The IP addresses are released last. If the addresses were released earlier, this pod's masquerade rules could match the packets of the
		// next pod with the same address.
		err = b.releaseAddresses(r, object)
	}
	return err
}

// delSuccessor handles a container that the reference plugin attached again after Podlace's attachment: the record exists, but the recorded
// link is gone. delSuccessor does nothing if prevResult contains the name of Podlace's link, because the reference plugin has then not
// attached the container again.
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

// deleteProven deletes the reference plugin's veth pair in the pod's namespace. If the namespace is unknown, deleteProven deletes the pair
// on the node.
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

// The names of host sides end with hexadecimal digits. Their number tells who made the link: Podlace (attachment.HostVeth) or the reference
// plugin.
const (
	ownDigits       = 11
	referenceDigits = 8
)

func isVeth(name string, digits int) bool {
	hash, ok := strings.CutPrefix(name, "veth")
	return ok && len(hash) == digits && strings.Trim(hash, "0123456789abcdef") == ""
}

// isOtherAttachment reports whether a host side belongs to an attachment other than the attachment in the request `r`. The names of
// Podlace's host sides contain a hash of the attachment's key, so the name identifies the attachment. The MAC in prevResult is no proof,
// because the MAC is computed from the address. Another pod with the same address has the same MAC, for example a pod in another network.
func isOtherAttachment(r *plugin.Request, name string) bool {
	return isVeth(name, ownDigits) && name != attachment.KeyOf(r).HostVeth()
}

// provenPodSide reports whether the pod's interface belongs to this attachment. The interface belongs to the attachment if prevResult
// contains the interface's name and MAC. Before cniVersion 0.4.0, runtimes pass no prevResult. Without prevResult, the name of the host
// side must have the format of the reference plugin, and the host side must be on the configured bridge. The first result of provenPodSide
// is the host side, if it exists.
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

// NameIn returns the name of the bridge in a configuration. Other parts of the configuration may be invalid.
func NameIn(config []byte) string {
	conf := struct {
		Bridge string `json:"bridge"`
	}{defaultBridge}
	if json.Unmarshal(config, &conf) != nil || conf.Bridge == "" {
		return defaultBridge
	}
	return conf.Bridge
}

// deleteHostSide deletes the reference plugin's veth pair on the node, if the pod's namespace is unknown but may still exist. The pair is
// deleted only if prevResult contains the name and MAC of the host side, and the bridge of the host side. Pods share the veth pair of a
// VLAN's gateway. deleteHostSide never deletes the pair of a gateway, because the gateway's end is not a bridge port.
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

// masqueradedByReference reports whether the reference plugin's rules masquerade all addresses. masqueradedByReference returns false if the
// attachment has a record.
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

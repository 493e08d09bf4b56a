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

// delUnrecorded is DEL for an attachment of the reference plugin, or with a lost record. It finds objects by their computed names. The
// reference's veth pair has no computed name; it is deleted only if provenPodSide says that it belongs to this attachment.
func (b bridge) delUnrecorded(r *plugin.Request, host *kernel.Node) error {
	key := attachment.KeyOf(r)
	// Our pair goes first, because it identifies its device group. Nothing else finds the group afterwards.
	err := errors.Join(delHostSide(host, key, 0), deleteProven(r, host), asReference(key).Remove(), delGuardOf(host, key.HostVeth()))
	if object := ipam.Object(r.Config); err == nil && ipam.ValidType(ipam.Type(object)) == nil {
		// The addresses are released last: the next pod with one of them must not meet the masquerade of this pod.
		err = b.releaseAddresses(r, object)
	}
	return err
}

// delSuccessor handles an attachment whose record is older than the live one: the recorded link is gone, and the reference plugin attached
// the container since. Usually there is no such successor; then prevResult names the recorded link.
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

// deleteProven deletes the veth pair, from the end that can be reached.
func deleteProven(r *plugin.Request, host *kernel.Node) error {
	if r.Netns == nil {
		return deleteHostSide(r, host)
	}
	pod, err := kernel.Open(r.Netns)
	if err != nil {
		return err
	}
	defer pod.Close()
	link, ok, err := pod.Link(r.IfName)
	if err != nil || !ok {
		return err
	}
	side, ok, err := provenPodSide(r, host, link)
	switch {
	case ok && side.LeadsGroup(): // our veth under another name
		return host.DelGroup(side)
	case ok:
		return pod.DelLink(r.IfName)
	}
	return err
}

// isReferenceVeth reports whether a name has the form of the reference's host sides: eight hexadecimal digits. Ours have eleven.
func isReferenceVeth(name string) bool { return isVeth(name, 8) }

func isVeth(name string, digits int) bool {
	hash, ok := strings.CutPrefix(name, "veth")
	return ok && len(hash) == digits && strings.Trim(hash, "0123456789abcdef") == ""
}

// isOtherAttachment reports whether a host side belongs to an attachment other than r's: our names are a hash of the key. prevResult may
// still match it, because the MAC follows from the address. The next pod with this address, or another network with the same one, has the
// same MAC.
func isOtherAttachment(r *plugin.Request, name string) bool {
	return isVeth(name, 11) && name != attachment.KeyOf(r).HostVeth()
}

// provenPodSide reports whether the pod's interface belongs to this attachment: prevResult contains its name and MAC. Runtimes pass no
// prevResult before cniVersion 0.4.0. Then the host side must have a name of the reference's form and be on the configured bridge. side is
// the host side, if there is one.
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
	if !ok || !isReferenceVeth(side.Name) || side.LeadsGroup() {
		return side, false, nil
	}
	bridge, ok, err := host.LinkByIndex(side.Master)
	return side, ok && bridge.Kind == "bridge" && bridge.Name == NameIn(r.Config), err
}

// NameIn returns the bridge of a configuration that may be invalid otherwise.
func NameIn(config []byte) string {
	conf := struct {
		Bridge string `json:"bridge"`
	}{defaultBridge}
	if json.Unmarshal(config, &conf) != nil || conf.Bridge == "" {
		return defaultBridge
	}
	return conf.Bridge
}

// deleteHostSide deletes the pair from the node, if the pod's namespace is out of reach but may be alive. prevResult must contain the host
// side's name and MAC, and the host side must be a port of the bridge in prevResult. A gateway's veth, which pods share, is no port.
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

// namedInPrevResult reports whether prevResult contains a node interface with this name.
func namedInPrevResult(r *plugin.Request, name string) bool {
	for _, i := range r.Prev.Interfaces {
		if i.Name == name && i.Sandbox == "" {
			return true
		}
	}
	return false
}

// masqueradedByReference reports whether the reference masquerades all addresses of an attachment without a record.
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

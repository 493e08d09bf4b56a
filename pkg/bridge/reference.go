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

// delUnrecorded is DEL for an attachment that the reference plugin made, or whose record is lost. Names are computed, and what has no
// such name, the veth pair, is deleted only when it is proven to be this attachment's.
func (b bridge) delUnrecorded(r *plugin.Request, host *kernel.Node) error {
	key := attachment.KeyOf(r)
	// Our pair goes first: with it goes its group, which nobody finds after the pair is gone.
	err := errors.Join(delHostSide(host, key, 0), deleteProven(r, host), asReference(key).Remove(), delGuardOf(host, key.HostVeth()))
	if object := ipam.Object(r.Config); err == nil && ipam.ValidType(ipam.Type(object)) == nil {
		// The addresses go back last: the next pod that gets one must not find the masquerade of this one.
		err = b.giveBack(r, object)
	}
	return err
}

// delSuccessor removes what the reference plugin made for an attachment whose record is of an earlier one: the link of the record is gone.
// Most often nothing comes after it, and prevResult tells: it names that link.
func delSuccessor(r *plugin.Request, host *kernel.Node) error {
	key := attachment.KeyOf(r)
	if r.Prev != nil && names(r, key.HostVeth()) {
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
	side, ok, err := proven(r, host, link)
	switch {
	case ok && side.LeadsGroup(): // ours, under another name
		return host.DelGroup(side)
	case ok:
		return pod.DelLink(r.IfName)
	}
	return err
}

// isReferenceVeth reports whether a name is one that the reference gives host sides: eight hexadecimal digits. Ours have eleven.
func isReferenceVeth(name string) bool { return isVeth(name, 8) }

func isVeth(name string, digits int) bool {
	hash, ok := strings.CutPrefix(name, "veth")
	return ok && len(hash) == digits && strings.Trim(hash, "0123456789abcdef") == ""
}

// isAnothers reports whether a host side is of an attachment other than that of r: ours are named by a hash of the key. prevResult may name
// it all the same: a MAC follows from the address, so that the next pod with the address, or a network with the same one, has it too.
func isAnothers(r *plugin.Request, name string) bool {
	return isVeth(name, 11) && name != attachment.KeyOf(r).HostVeth()
}

// proven reports whether the pod's interface is this attachment's: prevResult names it with its MAC. Without prevResult, which runtimes
// keep to themselves before cniVersion 0.4.0, its host side must be the reference's by name, and on the bridge of the configuration. side
// is the host side, if there is one.
func proven(r *plugin.Request, host *kernel.Node, link kernel.Link) (side kernel.Link, ok bool, err error) {
	side, ok, err = host.PeerOf(link, r.Netns)
	if err != nil {
		return side, false, err
	}
	ok = ok && link.Kind == "veth"
	if ok && isAnothers(r, side.Name) {
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
	return side, ok && bridge.Kind == "bridge" && bridge.Name == bridgeName(r.Config), err
}

// bridgeName returns the bridge of a configuration that may be wrong elsewhere.
func bridgeName(config []byte) string {
	conf := struct {
		Bridge string `json:"bridge"`
	}{defaultBridge}
	if json.Unmarshal(config, &conf) != nil || conf.Bridge == "" {
		return defaultBridge
	}
	return conf.Bridge
}

// deleteHostSide deletes the pair without its namespace, which may live on: prevResult must name the host side with its MAC, and it must
// be a port of the bridge that prevResult names. A gateway's veth, which pods share, is no port.
func deleteHostSide(r *plugin.Request, host *kernel.Node) error {
	if r.Prev == nil {
		return nil
	}
	for _, i := range r.Prev.Interfaces {
		if i.Sandbox != "" || i.Mac == "" || isAnothers(r, i.Name) {
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
		if ok && names(r, bridge.Name) {
			return host.DelLink(link.Name)
		}
	}
	return nil
}

// names reports whether prevResult has an interface of the node with this name.
func names(r *plugin.Request, name string) bool {
	for _, i := range r.Prev.Interfaces {
		if i.Name == name && i.Sandbox == "" {
			return true
		}
	}
	return false
}

// masqueradedByReference reports whether an attachment without a record has the reference's masquerade on all addresses.
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

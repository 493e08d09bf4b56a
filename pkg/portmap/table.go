// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// ownedBy returns the set elements in the kernel that still belong to the attachment: none without nftables.
func ownedBy(host *kernel.Node, h ownedPorts) (own []nft.Element, err error) {
	t, err := host.NFT.Open(nft.HostportTable)
	if err == nil {
		own, err = t.Existing(h.elements())
	}
	return slices.DeleteFunc(own, func(e nft.Element) bool { return ownerHash(e.Comment) != ownerHash(h.Owner) }), nft.IgnoreUnsupported(err)
}

// maxAsked is the longest port range that conflictingElements looks up port by port. For a longer one, it reads all ports of the node.
const maxAsked = 2000

// conflictingElements returns the elements in the kernel with the keys of an attachment's ports, and those for the same ports in other
// sets.
func conflictingElements(t *nft.Handle, h ownedPorts, elements []nft.Element) ([]nft.Element, error) {
	ask := slices.Clone(elements)
	whole := map[string]bool{} // sets that are read completely
	for _, p := range h.Ports {
		family := nft.FamilyOf(p.Is4()).Digit
		if p.Last != 0 {
			whole["ranges"+family] = true
		} else if !p.HostIP.IsValid() {
			ask = append(ask, nft.Element{Set: "ranges" + family, Key: nft.Key([]byte{p.Number()}, nft.BigEndian(p.Port))})
		}
		if int(p.End()-p.Port) > maxAsked {
			whole["ports"+family], whole["taken"+family] = true, true
			continue
		}
		for _, one := range ports.Singles([]ports.Port{p}) {
			if h.ByIPTables || p.Last != 0 {
				ask = append(ask, elementsOf(one, "")[0])
			}
			if !h.ByIPTables {
				ask = append(ask, takenElement(one, ""))
			}
		}
	}
	var clashes []nft.Element
	for _, set := range slices.Sorted(maps.Keys(whole)) {
		all, err := t.List(set)
		if err != nil {
			return nil, err
		}
		clashes = append(clashes, all...)
	}
	clashes = slices.DeleteFunc(clashes, func(e nft.Element) bool {
		return !slices.ContainsFunc(h.Ports, func(p ports.Port) bool { return p.Overlaps(portOf(e)) })
	})
	found, err := t.Existing(ask)
	return uniqueElements(append(found, clashes...)), err
}

// restoreTable rewrites missing or changed rules and adds the missing ports of all attachments, except ports that another attachment has
// taken meanwhile. lacked is true if anything was missing, and always false without nftables. The caller holds portsLock.
func restoreTable(host *kernel.Node, all []ownedPorts) (lacked bool, err error) {
	drift, err := HostportSchema().Drift(&host.NFT)
	if err != nil {
		return false, nft.IgnoreUnsupported(err)
	}
	t, err := host.NFT.Open(nft.HostportTable)
	if err != nil {
		return false, err
	}
	var want []nft.Element
	for _, h := range all {
		if want = append(want, h.elements()...); h.Bridge != "" && !h.ByIPTables {
			want = append(want, hairpin(h.Bridge))
		}
	}
	wrong, missing, err := compareElements(t, uniqueElements(want))
	if err != nil || drift == "" {
		return len(missing)+len(wrong) > 0, errors.Join(err, t.Replace(wrong, missing))
	}
	if err := t.Delete(wrong); err != nil {
		return true, err
	}
	return true, HostportSchema().Install(missing)
}

// ensureHairpin masquerades connections that enter and leave through the same link, whose replies would bypass the node: only the node can
// translate their addresses.
func ensureHairpin(t *nft.Handle, link string) error {
	e := hairpin(link)
	_, ok, err := t.Get(e)
	if err != nil || ok {
		return err
	}
	err = t.Add([]nft.Element{e})
	return fault.Ignore(err, unix.EEXIST)
}

func hairpin(link string) nft.Element {
	return nft.Element{Set: "hairpin", Key: append(nft.IfName(link), nft.IfName(link)...)}
}

// delOwnedHostPorts ends the forwarding of all ports of the attachment with this hash, and returns them. It reads all ports of the node.
func delOwnedHostPorts(host *kernel.Node, hash string) (gone []ports.Port, err error) {
	own, err := elementsOfHash(host, hash)
	if err := nft.IgnoreUnsupported(err); err != nil {
		return nil, err
	}
	for _, e := range own {
		if isForward(e) {
			gone = append(gone, portOf(e))
		}
	}
	return gone, endOwned(host, hash, anyLink, own)
}

// elementsOfHash returns all set elements of the attachment with this hash.
func elementsOfHash(host *kernel.Node, hash string) (own []nft.Element, err error) {
	t, err := host.NFT.Open(nft.HostportTable)
	if err != nil {
		return nil, err
	}
	if own, err = t.Existing([]nft.Element{ownerElement(hash)}); err != nil {
		return nil, err
	}
	for _, set := range []string{"ports", "hostip_ports", "ranges", "taken", "snat", "masqall", "snat_ranges", "masqall_ranges"} {
		for _, family := range nft.Families() {
			list, err := t.List(set + family.Digit)
			if err != nil {
				return nil, err
			}
			own = append(own, list...)
		}
	}
	return slices.DeleteFunc(own, func(e nft.Element) bool { return ownerHash(e.Comment) != hash }), nil
}

// endOwned deletes the set elements of an attachment, and the rules that protect 127.0.0.0/8 if no other attachment needs them.
func endOwned(host *kernel.Node, hash, link string, own []nft.Element) error {
	users, last, err := closeLoopback(host, hash, link)
	if err != nil {
		return err
	}
	edits := []nft.Edit{{Kind: unix.NFT_MSG_DELSETELEM, Elements: own}}
	if last {
		if has, err := nft.HasTable(nft.LoopbackTable); err != nil {
			return err
		} else if has {
			edits = append(edits, nft.Edit{Kind: unix.NFT_MSG_DELTABLE, Table: nft.LoopbackTable})
		}
	}
	t, err := host.NFT.Open(nft.HostportTable)
	if err == nil {
		err = t.Apply(fmt.Sprintf("nft delete %d elements of %s", len(own), t.Table), edits...)
	}
	if err := nft.IgnoreUnsupported(err); err != nil {
		return err
	}
	return forgetUser(hash, users)
}

// findOwner looks for an attachment with hostPorts by the hash of its key. It finds none without nftables.
func findOwner(host *kernel.Node, hash string) (owner portOwner, ok bool, err error) {
	t, err := host.NFT.Open(nft.HostportTable)
	if err != nil {
		return portOwner{}, false, nft.IgnoreUnsupported(err)
	}
	e, ok, err := t.Get(ownerElement(hash))
	return ownerOf(e), ok, nft.IgnoreUnsupported(err)
}

// listOwners returns all attachments that have hostPorts in nf_tables.
func listOwners(host *kernel.Node) (owners []portOwner, err error) {
	t, err := host.NFT.Open(nft.HostportTable)
	if err != nil {
		return nil, nft.IgnoreUnsupported(err)
	}
	all, err := t.List("owners")
	for _, e := range all {
		owners = append(owners, ownerOf(e))
	}
	return owners, nft.IgnoreUnsupported(err)
}

// rulesDrift describes how the hostPort rules differ from those in the kernel, and the rules that protect 127.0.0.0/8 if an attachment
// needs them.
func rulesDrift(host *kernel.Node) (string, error) {
	drift, err := HostportSchema().Drift(&host.NFT)
	if err != nil || drift != "" || !loopbackUsed() {
		return drift, err
	}
	return loopbackSchema().Drift(&host.NFT)
}

// rulesIntact reports whether the hostPort rules exist, and those that protect 127.0.0.0/8 if an attachment needs them. It is quick, for
// ADD, because it only compares the number of rules.
func rulesIntact(host *kernel.Node) (bool, error) {
	if ok, err := HostportSchema().Intact(&host.NFT); !ok || err != nil {
		return false, err
	}
	if !loopbackUsed() {
		return true, nil
	}
	return loopbackSchema().Intact(&host.NFT)
}

// checkHostPorts fails with plugin.CodeStateDiffers unless each port is forwarded to the pod and belongs to the attachment, or to another
// one that shares it. by caches the names of other owners.
func checkHostPorts(host *kernel.Node, h ownedPorts, by otherOwners) error {
	t, err := host.NFT.Open(nft.HostportTable)
	if err != nil {
		return err
	}
	if drift, err := rulesDrift(host); err != nil {
		return err
	} else if drift != "" {
		return plugin.WithHint(plugin.Differs("%s", drift),
			"another program flushed or changed them; 'podlace reload' brings back those of all pods")
	}
	if err := checkElements(t, h, by); err != nil || h.ByIPTables {
		return err
	}
	if h.Bridge != "" {
		if _, ok, err := t.Get(hairpin(h.Bridge)); err != nil {
			return err
		} else if !ok {
			return plugin.WithHint(plugin.Differs("the entry of %s in nftables set hairpin is missing: pods there do not reach the hostPorts",
				h.Bridge), reloadHint)
		}
	}
	return checkShadows(t, h, by)
}

// checkElements compares each set element of the attachment in the kernel with the expected one.
func checkElements(t *nft.Handle, h ownedPorts, by otherOwners) error {
	want := h.elements()
	found, err := t.Find(want)
	if err != nil {
		return err
	}
	owned := false
	var missing []nft.Element
	for i, e := range want {
		got := found[i]
		switch {
		case e.Set == "owners":
			owned = got != nil
		case got == nil:
			missing = append(missing, e)
		case got.Comment == "":
			return plugin.WithHint(plugin.Differs("hostPort %s: another program wrote its entry in nftables set %s", portOf(e), e.Set), reloadHint)
		case ownerHash(got.Comment) != ownerHash(h.Owner):
			if o := by.lookUp(got.Comment); !o.shares {
				return plugin.Differs(belongsTo, portOf(e), o.name)
			}
		case !sameValue(*got, e):
			return plugin.WithHint(plugin.Differs("hostPort %s: leads elsewhere", portOf(e)), reloadHint)
		}
	}
	if err := lostPorts(t, h, missing, by); err != nil || owned {
		return err
	}
	return plugin.WithHint(
		plugin.Differs("nftables set owners: the entry of %s is missing; without a record DEL needs it to find the hostPorts",
			ownerName(h.Owner)), reloadHint)
}

const (
	belongsTo  = "hostPort %s: now belongs to %s"
	reloadHint = "'podlace reload' brings it back"
)

// lostPorts returns the error for the first missing set element. A port is not missing if another attachment shares it and has an element
// for it.
func lostPorts(t *nft.Handle, h ownedPorts, missing []nft.Element, by otherOwners) error {
	if len(missing) == 0 {
		return nil
	}
	found, err := conflictingElements(t, h, nil)
	if err != nil {
		return err
	}
	found = slices.DeleteFunc(found, func(o nft.Element) bool { return !isForward(o) || ownerHash(o.Comment) == ownerHash(h.Owner) })
	var shared ports.Index
	for _, o := range found {
		if by.lookUp(o.Comment).shares {
			shared.Add(o.Comment, portOf(o))
		}
	}
	for _, e := range missing {
		if isForward(e) && shared.Overlap(portOf(e), "") {
			continue
		}
		for _, o := range found {
			if isForward(e) && portOf(o).Overlaps(portOf(e)) {
				return plugin.Differs(belongsTo, portOf(o), by.lookUp(o.Comment).name)
			}
		}
		return plugin.Differs("hostPort %s: its entry in nftables set %s is missing", portOf(e), e.Set)
	}
	return nil
}

// checkShadows fails if another backend forwards the same port to another pod, because its rules run before the nftables rules.
func checkShadows(t *nft.Handle, h ownedPorts, by otherOwners) error {
	var ask []nft.Element
	for _, p := range ports.Singles(h.Ports) {
		every := p
		every.HostIP = netip.Addr{}
		ask = append(ask, takenElement(p, ""), takenElement(every, ""))
	}
	found, err := t.Existing(uniqueElements(ask))
	found = slices.DeleteFunc(found, func(e nft.Element) bool { return by.lookUp(e.Comment).shares })
	if err != nil || len(found) == 0 {
		return err
	}
	return plugin.Differs("hostPort %s: %s has it too, in the iptables backend, whose rules come first", portOf(found[0]),
		ownerName(found[0].Comment))
}

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

// errFlushed tells that the rules are missing, and with them perhaps what belongs to other pods: restoreHostPorts comes first.
var errFlushed = errors.New("the rules of hostPorts are missing")

// addHostPorts forwards the ports, all or none, in one transaction. yields is asked about another owner of one of the ports: it returns what
// that owner loses besides the port, errShared if the owner keeps the port and the caller has to be content with that, or the error that refuses
// the caller. The caller holds a lock against other callers.
func addHostPorts(host *kernel.Node, h owned, yields func(owner string, p ports.Port) ([]owned, error)) error {
	if ok, err := rulesIntact(host); err != nil {
		return err
	} else if !ok {
		return errFlushed
	}
	t, err := host.NFT.Open(nft.HostportTable)
	if err != nil {
		return err
	}
	elements := h.elements()
	found, err := clashes(t, h, elements)
	if err != nil {
		return err
	}
	var gone []nft.Element
	var shared ports.Index
	for _, e := range found {
		if isForward(e) && ownerHash(e.Comment) != ownerHash(h.Owner) {
			loses, err := yields(e.Comment, portOf(e))
			if errors.Is(err, errShared) {
				shared.Add(e.Comment, portOf(e))
				continue
			}
			for _, lost := range loses {
				more, e := ownedBy(t, lost)
				gone, err = append(gone, more...), errors.Join(err, e)
			}
			if err != nil {
				return err
			}
		}
		gone = append(gone, e)
	}
	if elements, err = withoutShared(elements, shared); err != nil {
		return err
	}
	if err := t.Replace(once(gone), elements); err != nil {
		return err
	}
	if h.Bridge == "" || h.Taken {
		return nil
	}
	return ensureHairpin(t, h.Bridge)
}

// ownedBy returns the elements of h that are there and still its owner's.
func ownedBy(t *nft.Handle, h owned) ([]nft.Element, error) {
	found, err := t.Existing(h.elements())
	return slices.DeleteFunc(found, func(e nft.Element) bool { return ownerHash(e.Comment) != ownerHash(h.Owner) }), err
}

// maxAsked is how long a range may be whose ports are asked for one by one. For a longer one all ports of the node are looked at.
const maxAsked = 2000

// clashes returns the elements that stand in the way of those of h: of the same keys, and the same ports in other sets.
func clashes(t *nft.Handle, h owned, elements []nft.Element) ([]nft.Element, error) {
	ask := slices.Clone(elements)
	whole := map[string]bool{} // sets that are looked at as a whole
	for _, p := range h.Ports {
		family := nft.Digit(p.Is4())
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
			if h.Taken || p.Last != 0 {
				ask = append(ask, elementsOf(one, "")[0])
			}
			if !h.Taken {
				ask = append(ask, taken(one, ""))
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
	return once(append(found, clashes...)), err
}

// restoreHostPorts writes the rules anew, and adds what is missing of the ports of all attachments. What another one has by now is left with
// it. The caller holds the lock of addHostPorts.
func restoreHostPorts(host *kernel.Node, all []owned) error {
	t, err := host.NFT.Open(nft.HostportTable)
	if err != nil {
		return err
	}
	rules := 0
	if err = BuildTable(); err == nil {
		rules, err = t.CountRules()
	}
	if err != nil {
		return err
	}
	var want []nft.Element
	for _, h := range all {
		want = append(want, h.elements()...)
		if h.Bridge != "" && !h.Taken {
			if err := ensureHairpin(t, h.Bridge); err != nil {
				return err
			}
		}
	}
	want = once(want)
	has, err := t.Find(want)
	if err != nil {
		return err
	}
	var missing []nft.Element
	for i, e := range want {
		if has[i] == nil {
			missing = append(missing, e)
		}
	}
	if err := t.Add(missing); err != nil {
		return err
	}
	return t.Mark(schema, rules)
}

// ensureHairpin lets connections that come in and go out through the same link be masqueraded: their answers would otherwise go
// straight back, past the node that has to translate them.
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

// delHostPorts ends the forwarding of ports that the owner still has, and of what it opened on 127.0.0.1, in one transaction.
func delHostPorts(host *kernel.Node, h owned) error {
	return endHostPorts(host, h.Owner, h.Localhost, func(t *nft.Handle) ([]nft.Element, error) { return ownedBy(t, h) })
}

// delOwnedHostPorts ends the forwarding of whatever ports the owner with a hash has, and returns them. It looks at all ports of the node.
func delOwnedHostPorts(host *kernel.Node, hash string) (ports []ports.Port, err error) {
	err = endHostPorts(host, hash, anyLink, func(t *nft.Handle) ([]nft.Element, error) {
		all, err := t.Existing([]nft.Element{ownerElement(hash)})
		if err != nil {
			return nil, err
		}
		for _, set := range []string{"ports", "hostip_ports", "ranges", "taken", "snat", "masqall", "snat_ranges", "masqall_ranges"} {
			for _, family := range []string{nft.Digit(true), nft.Digit(false)} {
				list, err := t.List(set + family)
				if err != nil {
					return nil, err
				}
				all = append(all, list...)
			}
		}
		for _, e := range all {
			if isForward(e) && ownerHash(e.Comment) == hash {
				ports = append(ports, portOf(e))
			}
		}
		return all, nil
	})
	return ports, err
}

func endHostPorts(host *kernel.Node, owner, link string, find func(*nft.Handle) ([]nft.Element, error)) error {
	last, finish, err := closeLoopback(host, ownerHash(owner), link)
	if err != nil {
		return err
	}
	t, err := host.NFT.Open(nft.HostportTable)
	var found []nft.Element
	if err == nil {
		found, err = find(t)
	}
	if err == nil {
		err = endOwned(t, owner, found, last)
	}
	if err := nft.IgnoreUnsupported(err); err != nil {
		return err
	}
	return finish()
}

// endOwned deletes those of the elements that are the owner's, and with them the protection of 127.0.0.0/8 once nobody is left who needs it.
func endOwned(t *nft.Handle, owner string, found []nft.Element, unprotect bool) error {
	own := slices.DeleteFunc(found, func(e nft.Element) bool { return ownerHash(e.Comment) != ownerHash(owner) })
	edits := []nft.Edit{{Kind: unix.NFT_MSG_DELSETELEM, Elements: own}}
	if unprotect {
		if has, err := nft.HasTable(nft.LoopbackTable); err != nil {
			return err
		} else if has {
			edits = append(edits, nft.Edit{Kind: unix.NFT_MSG_DELTABLE, Table: nft.LoopbackTable})
		}
	}
	return t.Apply(fmt.Sprintf("nft delete %d elements of %s", len(own), t.Table), edits...)
}

// portOwner tells whether an attachment has hostPorts, by the hash of its key. Without nftables nobody has.
func findOwner(host *kernel.Node, hash string) (owner portOwner, ok bool, err error) {
	t, err := host.NFT.Open(nft.HostportTable)
	if err != nil {
		return portOwner{}, false, nft.IgnoreUnsupported(err)
	}
	e, ok, err := t.Get(ownerElement(hash))
	return ownerOf(e), ok, nft.IgnoreUnsupported(err)
}

// listOwners returns all attachments that have hostPorts.
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

// rulesIntact tells whether the rules are there as they should, and the protection of the node's 127.0.0.0/8 if somebody needs it.
func rulesIntact(host *kernel.Node) (bool, error) {
	if ok, err := marked(host, nft.HostportTable, schema); !ok || err != nil {
		return false, err
	}
	if !loopbackUsed() {
		return true, nil
	}
	return loopbackProtected(host)
}

// checkHostPorts returns nil when each port is forwarded to the pod and is the owner's, or of one that shares it, else Differs.
// other tells who another owner is, and whether that one shares the port.
func checkHostPorts(host *kernel.Node, h owned, other func(owner string) (who string, shares bool)) error {
	t, err := host.NFT.Open(nft.HostportTable)
	if err != nil {
		return err
	}
	if ok, err := rulesIntact(host); err != nil {
		return err
	} else if !ok {
		return plugin.WithHint(differs("the rules of nftables tables inet %s and %s are missing", nft.HostportTable, nft.LoopbackTable),
			"somebody flushed them; 'podlace reload' brings back those of all pods")
	}
	want := h.elements()
	found, err := t.Find(want)
	if err != nil {
		return err
	}
	owned := false
	var missing []nft.Element
	for i, e := range want {
		got := found[i]
		if e.Set == "owners" {
			owned = got != nil
			continue
		}
		if got == nil {
			missing = append(missing, e)
			continue
		}
		if ownerHash(got.Comment) != ownerHash(h.Owner) {
			if who, shares := other(got.Comment); !shares {
				return differs(belongsTo, portOf(e), who)
			}
			continue
		}
		if string(got.Value) != string(e.Value) || string(got.Last) != string(e.Last) {
			return differs("hostPort %s: leads elsewhere", portOf(e))
		}
	}
	if err := lostPorts(t, h, missing, other); err != nil {
		return err
	}
	if !owned {
		return plugin.WithHint(differs("nftables set owners: the entry of %s is missing, by which DEL finds its hostPorts when the record is lost",
			ownerName(h.Owner)), reloadHint)
	}
	if h.Taken {
		return nil
	}
	if h.Bridge != "" {
		if _, ok, err := t.Get(hairpin(h.Bridge)); err != nil {
			return err
		} else if !ok {
			return plugin.WithHint(differs("the entry of %s in nftables set hairpin is missing: pods there do not reach the hostPorts", h.Bridge), reloadHint)
		}
	}
	return checkShadows(t, h, other)
}

const (
	belongsTo  = "hostPort %s: now belongs to %s"
	reloadHint = "'podlace reload' brings it back"
)

// differs is the error of CHECK when the state is not as ADD made it.
func differs(format string, args ...any) error {
	return plugin.Errorf(plugin.CodeStateDiffers, format, args...)
}

// lost returns the error about the first entry that is missing, unless another owner that shares its port has it in another form.
func lostPorts(t *nft.Handle, h owned, missing []nft.Element, other func(owner string) (string, bool)) error {
	if len(missing) == 0 {
		return nil
	}
	found, err := clashes(t, h, nil)
	if err != nil {
		return err
	}
	found = slices.DeleteFunc(found, func(o nft.Element) bool { return !isForward(o) || ownerHash(o.Comment) == ownerHash(h.Owner) })
	var shared ports.Index
	for _, o := range found {
		if _, shares := other(o.Comment); shares {
			shared.Add(o.Comment, portOf(o))
		}
	}
	for _, e := range missing {
		if isForward(e) && shared.Overlap(portOf(e), "") {
			continue
		}
		for _, o := range found {
			if isForward(e) && portOf(o).Overlaps(portOf(e)) {
				who, _ := other(o.Comment)
				return differs(belongsTo, portOf(o), who)
			}
		}
		return differs("hostPort %s: its entry in nftables set %s is missing", portOf(e), e.Set)
	}
	return nil
}

// checkShadows finds ports that another backend leads elsewhere, before the rules here see them.
func checkShadows(t *nft.Handle, h owned, other func(owner string) (string, bool)) error {
	var ask []nft.Element
	for _, p := range ports.Singles(h.Ports) {
		every := p
		every.HostIP = netip.Addr{}
		ask = append(ask, taken(p, ""), taken(every, ""))
	}
	found, err := t.Existing(once(ask))
	found = slices.DeleteFunc(found, func(e nft.Element) bool {
		_, shares := other(e.Comment)
		return shares
	})
	if err != nil || len(found) == 0 {
		return err
	}
	return differs("hostPort %s: %s has it too, by the iptables backend, which comes first", portOf(found[0]), ownerName(found[0].Comment))
}

// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"errors"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
)

// Guard says which frames a bridge port may send: ARP, neighbour discovery and IP only from Addresses or, if there are none, any frame with
// the pod's MAC. With Hairpin, it also says which of its own frames the port gets back (see addHairpinRules).
type Guard struct {
	Link      string       `json:"link"` // the host side
	MAC       string       `json:"mac"`  // of the pod side
	Addresses []netip.Addr `json:"addresses,omitempty"`
	Owner     string       `json:"owner,omitempty"` // for humans who read the rules
	Hairpin   bool         `json:"hairpin,omitempty"`
	AnySource bool         `json:"anySource,omitempty"` // no spoof protection
}

// checksSources reports whether the guard protects other pods from spoofing. There may be no guard.
func (g *Guard) checksSources() bool { return g != nil && !g.AnySource }

// elements returns what the sets of the guard table need for the port.
func (g Guard) elements() ([]nft.Element, error) {
	mac, err := net.ParseMAC(g.MAC)
	if err != nil {
		return nil, err
	}
	link := nft.IfName(g.Link)
	owner := g.Owner[:min(len(g.Owner), nft.MaxComment-1)]
	var out []nft.Element
	if g.Hairpin {
		out = append(out, nft.Element{Set: "hairpin", Key: nft.Key(link, link), Comment: owner})
	}
	if g.AnySource {
		return out, nil
	}
	out = append(out, nft.Element{Set: "mac_ports", Key: link, Comment: owner}, nft.Element{Set: "macs", Key: nft.Key(link, mac)})
	if len(g.Addresses) == 0 {
		return out, nil
	}
	out = append(out, nft.Element{Set: "ports", Key: link})
	for _, a := range append([]netip.Addr{linkLocal(mac)}, g.Addresses...) {
		out = append(out, nft.Element{Set: "addresses" + nft.FamilyOf(a.Is4()).Digit, Key: nft.Key(link, a.AsSlice())})
	}
	return out, nil
}

// linkLocal returns the IPv6 link-local address that the kernel derives from a MAC (RFC 4291 appendix A).
func linkLocal(mac net.HardwareAddr) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]})
}

// compareGuards returns nil if the kernel has this version's rules and the given guards. Otherwise it returns an error with
// plugin.CodeStateDiffers that describes what is missing.
func compareGuards(host *kernel.Node, guards ...Guard) error {
	if ok, err := guardSchema().Intact(&host.NFT); err != nil {
		return needBridgeFamily(err)
	} else if !ok {
		return plugin.Differs("the rules of nftables table bridge %s are missing", nft.GuardTable)
	}
	t, err := host.NFT.Open(nft.GuardTable)
	if err != nil {
		return err
	}
	for _, g := range guards {
		elements, err := g.elements()
		if err != nil {
			return err
		}
		missing, err := t.Missing(elements)
		if err != nil {
			return err
		}
		if len(missing) > 0 {
			return plugin.Differs("the guard of %s misses an entry in nftables set %s", g.Link, missing[0].Set)
		}
	}
	return nil
}

// SetGuards writes the rules and the given guards in one transaction. Guards of other ports stay.
func SetGuards(guards []Guard) error {
	var all []nft.Element
	for _, g := range guards {
		elements, err := g.elements()
		if err != nil {
			return err
		}
		all = append(all, elements...)
	}
	return needBridgeFamily(guardSchema().Install(all))
}

// guardDrift returns an error with plugin.CodeStateDiffers unless the rules are equal byte by byte, whereas compareGuards only counts them.
func guardDrift(host *kernel.Node) error {
	drift, err := guardSchema().Drift(&host.NFT)
	if err == nil && drift != "" {
		err = plugin.Differs("%s", drift)
	}
	return needBridgeFamily(err)
}

func (g Guard) open(host *kernel.Node) (t *nft.Handle, elements []nft.Element, err error) {
	if elements, err = g.elements(); err == nil {
		t, err = host.NFT.Open(nft.GuardTable)
	}
	return t, elements, err
}

// ensureGuard adds a guard to a port before the port is up. The rules must already exist.
func ensureGuard(host *kernel.Node, g Guard) error {
	t, elements, err := g.open(host)
	if err != nil {
		return err
	}
	err = t.Add(elements)
	if isExist(err) { // left by an attachment of the same name whose DEL was interrupted
		var old []nft.Element
		if old, err = t.Existing(elements); err == nil {
			err = t.Replace(old, elements)
		}
	}
	return err
}

func needBridgeFamily(err error) error {
	for _, no := range []error{unix.EAFNOSUPPORT, unix.EOPNOTSUPP, unix.EPROTONOSUPPORT} {
		if errors.Is(err, no) {
			return &kernel.MissingFeature{What: "nftables for bridges (CONFIG_NF_TABLES_BRIDGE)", Err: err}
		}
	}
	return err
}

// delGuard removes the guard of a port. It is a no-op if the guard is missing.
func delGuard(host *kernel.Node, g Guard) error {
	t, elements, err := g.open(host)
	if err != nil {
		return nft.IgnoreUnsupported(err)
	}
	found, err := t.Existing(elements)
	if err == nil {
		err = t.Delete(found)
	}
	return nft.IgnoreUnsupported(err)
}

// delGuardOf removes a guard by the port's name alone, for which it reads all guards of the node.
func delGuardOf(host *kernel.Node, link string) error {
	t, err := host.NFT.Open(nft.GuardTable)
	if err != nil {
		return nft.IgnoreUnsupported(err)
	}
	var found []nft.Element
	for _, set := range guardSets() {
		elements, err := t.List(set.name)
		if err != nil {
			return nft.IgnoreUnsupported(err)
		}
		for _, e := range elements {
			if bytes.HasPrefix(e.Key, nft.IfName(link)) {
				found = append(found, e)
			}
		}
	}
	return t.Apply("nft delete guard of "+link, nft.Edit{Kind: unix.NFT_MSG_DELSETELEM, Elements: found})
}

// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
)

// Guard says what a port of a bridge may send: with Addresses, ARP, neighbour discovery and IP of the pod itself and nothing else;
// without, any frame from the pod's MAC.
type Guard struct {
	Link      string       `json:"link"` // the host side
	MAC       string       `json:"mac"`  // of the pod side
	Addresses []netip.Addr `json:"addresses,omitempty"`
	Owner     string       `json:"owner,omitempty"` // for people who look at the rules
}

// elements returns what stands for the port in the sets of the table.
func (g Guard) elements() ([]nft.Element, error) {
	mac, err := net.ParseMAC(g.MAC)
	if err != nil {
		return nil, err
	}
	link := nft.IfName(g.Link)
	out := []nft.Element{{Set: "mac_ports", Key: link, Comment: g.Owner[:min(len(g.Owner), nft.MaxComment-1)]}, {Set: "macs", Key: nft.Key(link, mac)}}
	if len(g.Addresses) == 0 {
		return out, nil
	}
	out = append(out, nft.Element{Set: "ports", Key: link})
	for _, a := range append([]netip.Addr{linkLocal(mac)}, g.Addresses...) {
		out = append(out, nft.Element{Set: "addresses" + nft.Digit(a.Is4()), Key: nft.Key(link, a.AsSlice())})
	}
	return out, nil
}

// linkLocal returns the IPv6 link-local address that the kernel derives from a MAC (RFC 4291 appendix A).
func linkLocal(mac net.HardwareAddr) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]})
}

// hasGuards reports whether the rules of guards are there, all of them and in this version.
func hasGuards(host *kernel.Node) (bool, error) {
	t, err := host.NFT.Open(nft.GuardTable)
	if err != nil {
		return false, err
	}
	ok, err := t.Marked(guardSchema)
	return ok, needBridgeFamily(err)
}

// lacksGuards reports whether the rules or an entry of the guards is missing.
func lacksGuards(host *kernel.Node, guards []Guard) (bool, error) {
	if has, err := hasGuards(host); err != nil || !has {
		return !has && err == nil, err
	}
	t, err := host.NFT.Open(nft.GuardTable)
	if err != nil {
		return false, err
	}
	for _, g := range guards {
		want, err := g.elements()
		if err != nil {
			return false, err
		}
		if has, err := t.Existing(want); err != nil || len(has) < len(want) {
			return err == nil, err
		}
	}
	return false, nil
}

// SetGuards makes the rules, with the guards of all ports in the same transaction. Guards that are there stay.
func SetGuards(guards []Guard) error {
	bySet := map[string][]nftables.SetElement{}
	for _, g := range guards {
		elements, err := g.elements()
		if err != nil {
			return err
		}
		for _, e := range elements {
			bySet[e.Set] = append(bySet[e.Set], nftables.SetElement{Key: e.Key, Comment: e.Comment})
		}
	}
	return needBridgeFamily(nft.Build("nft set table bridge "+nft.GuardTable, func(c *nftables.Conn) error {
		sets, err := buildGuards(c)
		if err != nil {
			return err
		}
		for name, elements := range bySet {
			for some := range slices.Chunk(elements, nft.MaxElements) {
				if err := c.SetAddElements(sets[name], some); err != nil {
					return err
				}
			}
		}
		return nil
	}))
}

// ensureGuard puts a guard on a port, before the port is up, where the rules are there.
func ensureGuard(host *kernel.Node, g Guard) error {
	elements, err := g.elements()
	if err != nil {
		return err
	}
	t, err := host.NFT.Open(nft.GuardTable)
	if err != nil {
		return err
	}
	err = t.Add(elements)
	if isExist(err) { // of an attachment of the same name that was cut off
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

// delGuard takes the guard of a port away; what is not there is no error.
func delGuard(host *kernel.Node, g Guard) error {
	elements, err := g.elements()
	if err != nil {
		return err
	}
	t, err := host.NFT.Open(nft.GuardTable)
	if err != nil {
		return nft.IgnoreUnsupported(err)
	}
	found, err := t.Existing(elements)
	if err == nil {
		err = t.Delete(found)
	}
	return nft.IgnoreUnsupported(err)
}

// delGuardOf takes away the guard of a port of which nothing is known but its name. It reads all guards, if there are any.
func delGuardOf(link string) error {
	if ok, err := nft.HasTable(nft.GuardTable); err != nil || !ok {
		return err
	}
	conn, err := nft.New()
	if err != nil {
		return err
	}
	sets, err := conn.GetSets(nft.TableOf(nft.GuardTable).Netlink())
	found := 0
	for _, set := range sets {
		elements, e := conn.GetSetElements(set)
		err = errors.Join(err, e)
		elements = slices.DeleteFunc(elements, func(e nftables.SetElement) bool { return !bytes.HasPrefix(e.Key, nft.IfName(link)) })
		if found += len(elements); len(elements) > 0 {
			err = errors.Join(err, conn.SetDeleteElements(set, elements))
		}
	}
	if err != nil || found == 0 {
		return err
	}
	return fault.Change("nft delete guard of "+link, conn.Flush)
}

// checkGuard returns nil when the guard is whole, else an error of plugin.CodeStateDiffers.
func checkGuard(host *kernel.Node, g Guard) error {
	elements, err := g.elements()
	if err != nil {
		return err
	}
	t, err := host.NFT.Open(nft.GuardTable)
	if err != nil {
		return err
	}
	if ok, err := t.Marked(guardSchema); err != nil || !ok {
		return errors.Join(differs("nftables rules of table bridge %s are missing", nft.GuardTable), err)
	}
	for _, e := range elements {
		if _, ok, err := t.Get(e); err != nil {
			return err
		} else if !ok {
			return differs("the guard of %s misses an entry in nftables set %s", g.Link, e.Set)
		}
	}
	return nil
}

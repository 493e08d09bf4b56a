// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/plugin"
)

// Guard says what a port of a bridge may send: with Addresses, ARP, neighbour discovery and IP of the pod itself and nothing else;
// without, any frame from the pod's MAC.
type Guard struct {
	Link      string       `json:"link"` // the host side
	MAC       string       `json:"mac"`  // of the pod side
	Addresses []netip.Addr `json:"addresses,omitempty"`
}

// elements returns what stands for the port in the sets of the table.
func (g Guard) elements(owner string) ([]element, error) {
	mac, err := net.ParseMAC(g.MAC)
	if err != nil {
		return nil, err
	}
	link := ifname(g.Link)
	out := []element{{Set: "mac_ports", Key: link, Comment: owner}, {Set: "macs", Key: key(link, mac)}}
	if len(g.Addresses) == 0 {
		return out, nil
	}
	out = append(out, element{Set: "ports", Key: link})
	for _, a := range append([]netip.Addr{linkLocal(mac)}, g.Addresses...) {
		out = append(out, element{Set: "addresses" + familyDigit(a.Is4()), Key: key(link, a.AsSlice())})
	}
	return out, nil
}

// linkLocal returns the IPv6 link-local address that the kernel derives from a MAC (RFC 4291 appendix A).
func linkLocal(mac net.HardwareAddr) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]})
}

func openGuards() (*nft, error) { return openFamily(unix.NFPROTO_BRIDGE, guardTable) }

// HasGuards tells whether the table of guards is there, in this version.
func (n *Node) HasGuards() (bool, error) {
	t, err := openGuards()
	if err != nil {
		return false, err
	}
	defer t.close()
	ok, err := t.marked(guardSchema)
	return ok, needBridgeFamily(err)
}

// EnsureGuard puts a guard on a port, before the port is up. owner is for people who look at the rules.
func (n *Node) EnsureGuard(g Guard, owner string) error {
	elements, err := g.elements(owner)
	if err != nil {
		return err
	}
	t, err := openGuards()
	if err != nil {
		return err
	}
	defer t.close()
	ok, err := t.marked(guardSchema)
	if err == nil && !ok {
		err = skeleton("nft add table bridge "+guardTable, buildGuards)
	}
	if err == nil {
		err = t.add(elements)
	}
	if isExist(err) { // of an attachment of the same name that was cut off
		var old []element
		if old, err = t.existing(elements); err == nil {
			err = t.replace(old, elements)
		}
	}
	return needBridgeFamily(err)
}

func needBridgeFamily(err error) error {
	for _, no := range []error{unix.EAFNOSUPPORT, unix.EOPNOTSUPP, unix.EPROTONOSUPPORT} {
		if errors.Is(err, no) {
			return plugin.Errorf(plugin.CodeKernelFeature, "the kernel has no nftables for bridges (CONFIG_NF_TABLES_BRIDGE): %w", err)
		}
	}
	return err
}

// DelGuard takes the guard of a port away; what is not there is no error.
func (n *Node) DelGuard(g Guard) error {
	elements, err := g.elements("")
	if err != nil {
		return err
	}
	t, err := openGuards()
	if err != nil {
		return ignore(err, noNFT[:]...)
	}
	defer t.close()
	found, err := t.existing(elements)
	if err == nil {
		err = t.delete(found)
	}
	return ignore(err, noNFT[:]...)
}

// CheckGuard returns nil when the guard is whole, else an error with code 100.
func (n *Node) CheckGuard(g Guard) error {
	elements, err := g.elements("")
	if err != nil {
		return err
	}
	if ok, err := guardsAreWhole(); err != nil || !ok {
		return errors.Join(plugin.Errorf(plugin.CodeStateDiffers, "nftables rules of table bridge %s are missing", guardTable), err)
	}
	t, err := openGuards()
	if err != nil {
		return err
	}
	defer t.close()
	for _, e := range elements {
		if _, ok, err := t.get(e); err != nil {
			return err
		} else if !ok {
			return plugin.Errorf(plugin.CodeStateDiffers, "the guard of %s misses an entry in nftables set %s", g.Link, e.Set)
		}
	}
	return nil
}

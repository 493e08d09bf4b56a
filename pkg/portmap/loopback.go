// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/store"
)

// loopbackSchema is the version of the table.
const loopbackSchema = 1

// protectPriority is that of the raw table: before connection tracking.
const protectPriority = -300

// loopbackUsers has a folder for each link with route_localnet, and in it a file for each attachment that needs it. It may be lost,
// so it never decides alone that no attachment is left.
var loopbackUsers = filepath.Join(store.Root, ".localhost")

// foreign begins the folder of a link whose route_localnet is not ours to switch off. No link has a colon in its name.
const foreign = "foreign:"

// buildLoopback writes rules that drop what comes from the network for 127.0.0.0/8 or claims to be from there. A hostPort on 127.0.0.1
// needs route_localnet on the pods' interface, with which every pod could otherwise reach what listens on the node's loopback. The table
// stays for as long as a link has route_localnet.
func buildLoopback(r nft.Ruleset) error {
	chain := r.Chain("prerouting", nftables.ChainHookPrerouting, protectPriority, nftables.ChainTypeFilter)
	ipv4 := nft.FamilyOf(true)
	notLo := []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: nft.IfName("lo")}}
	for _, offset := range []uint32{ipv4.Source, ipv4.Destination} {
		// Every packet comes here: what nearly none has is looked at first.
		r.Rule(chain, slices.Concat(ipv4.Only(), loopback(offset), notLo, nft.Drop())...)
	}
	return r.Mark(loopbackSchema)
}

// loopback matches an IPv4 address in 127.0.0.0/8.
func loopback(offset uint32) []expr.Any {
	return []expr.Any{nft.Network(1, offset, 1), nft.Equal([]byte{127})}
}

func marked(host *kernel.Node, table string, version uint16) (bool, error) {
	t, err := host.NFT.Open(table)
	if err != nil {
		return false, err
	}
	return t.Marked(version)
}

// loopbackProtected reports whether the protection is in place.
func loopbackProtected(host *kernel.Node) (bool, error) {
	return marked(host, nft.LoopbackTable, loopbackSchema)
}

// loopbackUsed reports whether an attachment is recorded that the node's 127.0.0.1 reaches. It is one look at a folder.
func loopbackUsed() bool {
	users, err := names(loopbackUsers, 1)
	return err != nil || len(users) > 0
}

// ProtectLoopback drops packets from the network for 127.0.0.0/8.
func ProtectLoopback(host *kernel.Node) error {
	if ok, err := marked(host, nft.LoopbackTable, loopbackSchema); ok || err != nil {
		return err
	}
	return installLoopback()
}

func installLoopback() error {
	return nft.Install("nft add table "+nft.LoopbackTable, nft.LoopbackTable, buildLoopback)
}

// restoreProtection writes the protection anew if it is missing or was changed; restored reports whether it was.
func restoreProtection(host *kernel.Node) (restored bool, err error) {
	if drift, err := tableDrift(host, nft.LoopbackTable, loopbackSchema, buildLoopback); err != nil || drift == "" {
		return false, err
	}
	return true, installLoopback()
}

// openedByUs is the value of route_localnet that Podlace writes. The kernel takes every value but 0 for on, and other programs write 1. So
// the kernel itself says which links Podlace opened, also when records and rules are lost.
const openedByUs = "2"

func routeLocalnet(link, value string) kernel.Sysctl {
	return kernel.Sysctl{Path: "ipv4/conf/" + link + "/route_localnet", Value: value}
}

// loopbackReaches reports whether route_localnet is on for a link or for all links.
func loopbackReaches(host *kernel.Node, link string) bool {
	for _, name := range []string{link, "all"} {
		if on, err := host.Get(routeLocalnet(name, "").Path); err != nil || on != "0" {
			return true
		}
	}
	return false
}

// OpenLoopback lets the node's 127.0.0.1 reach the pods behind a link, for the attachment with the hash owner. The node's own loopback is
// protected from them first. Callers hold a lock against one another.
func OpenLoopback(host *kernel.Node, owner, link string) error {
	on, _ := host.Get(routeLocalnet(link, "").Path)
	name := link
	if _, err := os.Stat(filepath.Join(loopbackUsers, link)); err != nil && on == "1" {
		name = foreign + link
	}
	// The file comes first: DEL finds by it what to close.
	users, err := store.Make(filepath.Join(loopbackUsers, name), 0o700)
	if err != nil {
		return err
	}
	defer users.Close()
	if err := users.Create(owner, nil, 0o600); err != nil && !errors.Is(err, fs.ErrExist) {
		_ = os.Remove(users.Path())
		return err
	}
	if err := ProtectLoopback(host); err != nil {
		return err
	}
	if name != link {
		return nil
	}
	return host.Set(routeLocalnet(link, openedByUs))
}

// lendLoopback leaves a link that Podlace opened to the rules of the reference plugins, which need route_localnet and never switch it off.
func lendLoopback(host *kernel.Node, link string) error {
	if on, err := host.Get(routeLocalnet(link, "").Path); err != nil || on != openedByUs {
		return fault.Ignore(err, fs.ErrNotExist)
	}
	return host.Set(routeLocalnet(link, "1"))
}

// opened returns the links for which Podlace switched route_localnet on. It looks at all links of the node.
func opened(host *kernel.Node) (links []string, err error) {
	values, err := routeLocalnets(host)
	for link, value := range values {
		if value == openedByUs {
			links = append(links, link)
		}
	}
	return links, err
}

// openedUnknown reports whether route_localnet is on for a link without a note of who switched it on. Earlier versions of Podlace wrote 1,
// as other programs do: when records are lost, it may be theirs.
func openedUnknown(host *kernel.Node) (bool, error) {
	values, err := routeLocalnets(host)
	for link, value := range values {
		if _, unknown := os.Lstat(filepath.Join(loopbackUsers, foreign+link)); value == "1" && unknown != nil {
			return true, err
		}
	}
	return false, err
}

// routeLocalnets returns the value of route_localnet for each link of the node. "all" and "default" are no links.
func routeLocalnets(host *kernel.Node) (map[string]string, error) {
	links, err := host.List("ipv4/conf")
	values := map[string]string{}
	for _, link := range links {
		if value, err := host.Get(routeLocalnet(link, "").Path); err == nil && link != "all" && link != "default" {
			values[link] = value
		}
	}
	return values, err
}

// LoopbackOpen reports whether Podlace left route_localnet on for any link. It looks at all links of the node.
func LoopbackOpen(host *kernel.Node) (bool, error) {
	links, err := opened(host)
	return len(links) > 0, err
}

// loopbackOpenedOn reports whether Podlace switched route_localnet on for a link. It reads one file.
func loopbackOpenedOn(link string) bool {
	if link != filepath.Base(link) {
		return false
	}
	value, err := os.ReadFile(filepath.Join("/proc/sys/net", routeLocalnet(link, "").Path))
	return err == nil && strings.TrimSpace(string(value)) == openedByUs
}

// CloseLoopback switches route_localnet off for each link for which Podlace switched it on.
func CloseLoopback(host *kernel.Node) error {
	links, err := opened(host)
	for _, link := range links {
		err = errors.Join(err, host.Set(routeLocalnet(link, "0")))
	}
	return err
}

// mendLoopback protects the node's 127.0.0.0/8 again while a link is open, and closes the links once neither a record nor a hostPort in
// the kernel can need them. users are the attachments with a record, by the hashes of their keys. The caller holds the lock of the ports.
func mendLoopback(host *kernel.Node, users []string) error {
	lost := !loopbackUsed()
	links, err := opened(host)
	if err == nil && len(links) > 0 {
		_, err = restoreProtection(host)
	}
	if err != nil {
		return err
	}
	owners, err := listOwners(host)
	if err != nil {
		return err
	}
	for _, o := range owners {
		users = append(users, o.Hash)
	}
	if err := forgetUsers(users); err != nil || len(owners) > 0 || loopbackUsed() {
		return err
	}
	if err := CloseLoopback(host); err != nil {
		return err
	}
	if has, err := nft.HasTable(nft.LoopbackTable); err != nil || !has {
		return err
	}
	if lost {
		if unknown, err := openedUnknown(host); err != nil || unknown {
			return err
		}
	}
	return nft.DelTable(nft.TableOf(nft.LoopbackTable))
}

// forgetUsers removes the files of attachments that are no users, and folders without files.
func forgetUsers(users []string) error {
	keep := map[string]bool{}
	for _, owner := range users {
		keep[owner] = true
	}
	links, err := names(loopbackUsers, -1)
	for _, link := range links {
		folder := filepath.Join(loopbackUsers, link)
		owners, e := names(folder, -1)
		err = errors.Join(err, e)
		for _, owner := range owners {
			if !keep[owner] {
				err = errors.Join(err, forgetUser(owner, []string{link}))
			}
		}
		_ = os.Remove(folder) // fails while it has files
	}
	return err
}

// anyLink stands for every link: the caller does not know which one was opened.
const anyLink = "*"

// closeLoopback ends what OpenLoopback began for the owner on a link, "" for none: the last user of a link switches route_localnet off.
// last says that no link of Podlace is open any more, so that the caller may remove the protection; after that the caller forgets the owner
// as a user of the links in users. Callers hold the lock of OpenLoopback.
func closeLoopback(host *kernel.Node, owner, link string) (users []string, last bool, err error) {
	links := []string{link, foreign + link}
	switch link {
	case "":
		return nil, false, nil
	case anyLink:
		if links, err = names(loopbackUsers, -1); err != nil {
			return nil, false, err
		}
	}
	// A folder without users is of somebody who was killed.
	links = slices.DeleteFunc(links, func(link string) bool { return os.Remove(filepath.Join(loopbackUsers, link)) == nil })
	ending := 0
	for _, link := range links {
		folder := filepath.Join(loopbackUsers, link)
		if _, err := os.Lstat(filepath.Join(folder, owner)); err != nil {
			continue
		}
		users = append(users, link)
		few, err := names(folder, 2)
		if err != nil {
			return nil, false, err
		}
		if len(few) > 1 {
			continue
		}
		ending++
		if strings.HasPrefix(link, foreign) {
			continue
		}
		if err := host.Set(routeLocalnet(link, "0")); err != nil {
			return nil, false, err
		}
	}
	if few, err := names(loopbackUsers, ending+1); err != nil || len(few) > ending {
		return users, false, err
	}
	last, err = closeUnused(host, owner)
	if err == nil && last && len(users) == 0 {
		unknown, e := openedUnknown(host)
		last, err = !unknown, e
	}
	return users, last, err
}

// forgetUser removes the files of an owner for links, and folders without files.
func forgetUser(owner string, links []string) error {
	var errs []error
	for _, link := range links {
		folder := filepath.Join(loopbackUsers, link)
		errs = append(errs, fault.Change("forget a user of 127.0.0.1 on "+link, func() error {
			err := fault.Ignore(os.Remove(filepath.Join(folder, owner)), fs.ErrNotExist)
			if err == nil {
				err = fault.Ignore(os.Remove(folder), unix.ENOTEMPTY, fs.ErrNotExist)
			}
			return err
		}))
	}
	return errors.Join(errs...)
}

// closeUnused decides by the kernel when the records name no other user than the owner, because records can be lost: while another
// attachment has hostPorts, links that are still open stay open and protected.
func closeUnused(host *kernel.Node, owner string) (closed bool, err error) {
	links, err := opened(host)
	if err != nil || len(links) == 0 {
		return err == nil, err
	}
	owners, err := listOwners(host)
	if err != nil || slices.ContainsFunc(owners, func(o portOwner) bool { return o.Hash != owner }) {
		return false, err
	}
	return true, CloseLoopback(host)
}

// names returns at most so many names of a folder, which may be missing; all if less than 1 are wanted.
func names(folder string, most int) ([]string, error) {
	list, err := store.Names(folder, most)
	return list, fault.Ignore(err, fs.ErrNotExist)
}

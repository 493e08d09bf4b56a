// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"errors"
	"io/fs"
	"log/slog"
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

// loopbackSchema describes the table that protects the node's loopback addresses from the pods.
func loopbackSchema() nft.Schema {
	return nft.Schema{Table: nft.LoopbackTable, Version: 1, Build: buildLoopback}
}

// protectPriority is that of the raw table, before connection tracking.
const protectPriority = -300

// loopbackUsers has a folder for each link with route_localnet, and in it a file for each attachment that needs the link. Files may be
// lost, so an empty folder does not prove that no attachment uses the link.
const loopbackUsers = store.Root + "/.localhost"

// foreignPrefix starts a folder's name if another program enabled route_localnet on the link. It is unambiguous, since names of links
// contain no colon.
const foreignPrefix = "foreign:"

// buildLoopback writes rules that drop packets from the network with a source or destination in 127.0.0.0/8. A hostPort on 127.0.0.1 needs
// route_localnet, with which every pod could otherwise reach servers on the node's loopback. The table must exist as long as a link has
// route_localnet.
func buildLoopback(r nft.Ruleset) error {
	chain := r.Chain("prerouting", nftables.ChainHookPrerouting, protectPriority, nftables.ChainTypeFilter)
	ipv4 := nft.FamilyOf(true)
	notLo := []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: nft.IfName("lo")}}
	for _, offset := range []uint32{ipv4.Source, ipv4.Destination} {
		// Every packet of the node passes this rule, so the match that fails most often comes first.
		r.Rule(chain, slices.Concat(ipv4.Only(), matchLoopback(offset), notLo, nft.Drop())...)
	}
	return nil
}

// matchLoopback matches an IPv4 address in 127.0.0.0/8.
func matchLoopback(offset uint32) []expr.Any {
	return []expr.Any{nft.Network(1, offset, 1), nft.Equal([]byte{127})}
}

// loopbackUsed reports whether loopbackUsers contains any attachment. It reads one folder.
func loopbackUsed() bool {
	users, err := readNames(loopbackUsers, 1)
	return err != nil || len(users) > 0
}

// ProtectLoopback installs rules that drop packets from the network with a source or destination in 127.0.0.0/8.
func ProtectLoopback(host *kernel.Node) error {
	if ok, err := loopbackSchema().Intact(&host.NFT); ok || err != nil {
		return err
	}
	return loopbackSchema().Install(nil)
}

// restoreProtection rewrites the rules that protect 127.0.0.0/8 if they are missing or changed. Callers hold portsLock.
func restoreProtection(host *kernel.Node, log *slog.Logger) error {
	if drift, err := loopbackSchema().Drift(&host.NFT); err != nil || drift == "" {
		return err
	}
	log.Warn("the protection of the node's 127.0.0.0/8 was missing or changed and is restored")
	return loopbackSchema().Install(nil)
}

// openedByUs is the value of route_localnet that Podlace writes. The kernel takes every value but 0 for "on", and other programs write 1,
// so it identifies Podlace's links even without records and rules.
const openedByUs = "2"

func routeLocalnet(link, value string) kernel.Sysctl {
	return kernel.Sysctl{Path: "ipv4/conf/" + link + "/route_localnet", Value: value}
}

// loopbackReaches reports whether route_localnet is on for the link or for all links.
func loopbackReaches(host *kernel.Node, link string) bool {
	for _, name := range []string{link, "all"} {
		if on, err := host.Get(routeLocalnet(name, "").Path); err != nil || on != "0" {
			return true
		}
	}
	return false
}

// OpenLoopback protects the node's loopback from the pods and then makes the pods behind a link reachable through 127.0.0.1. owner is the
// hash of the attachment that needs the link. Callers hold portsLock.
func OpenLoopback(host *kernel.Node, owner, link string) error {
	on, _ := host.Get(routeLocalnet(link, "").Path)
	name := link
	if _, err := os.Stat(filepath.Join(loopbackUsers, link)); err != nil && on == "1" {
		name = foreignPrefix + link
	}
	// The file in loopbackUsers comes before route_localnet, because DEL finds the link by it.
	users, err := store.Make(filepath.Join(loopbackUsers, name), 0o700)
	if err != nil {
		return err
	}
	defer users.Close()
	if err := users.Create(owner, nil, 0o600); err != nil && !errors.Is(err, fs.ErrExist) {
		_, e := removeEmpty(users.Path())
		return errors.Join(err, e)
	}
	if err := ProtectLoopback(host); err != nil {
		return err
	}
	if name != link {
		return nil
	}
	return host.Set(routeLocalnet(link, openedByUs))
}

// leaveLoopbackOpen keeps route_localnet for the rules of the reference plugins, which need it and never disable it.
func leaveLoopbackOpen(host *kernel.Node, link string) error {
	if on, err := host.Get(routeLocalnet(link, "").Path); err != nil || on != openedByUs {
		return fault.Ignore(err, fs.ErrNotExist)
	}
	return host.Set(routeLocalnet(link, "1"))
}

// openedLinks returns the links on which Podlace enabled route_localnet. It reads all links of the node.
func openedLinks(host *kernel.Node) ([]string, error) {
	names, err := host.List("ipv4/conf")
	return slices.DeleteFunc(names, func(name string) bool {
		value, err := host.Get(routeLocalnet(name, "").Path)
		return err != nil || value != openedByUs || name == "all" || name == "default"
	}), err
}

// LoopbackOpen reports whether Podlace enabled route_localnet on any link. It reads all links of the node.
func LoopbackOpen(host *kernel.Node) (bool, error) {
	links, err := openedLinks(host)
	return len(links) > 0, err
}

// loopbackOpenedOn reports whether Podlace enabled route_localnet on a link. It reads one file.
func loopbackOpenedOn(link string) bool {
	if link != filepath.Base(link) {
		return false
	}
	value, err := os.ReadFile(filepath.Join("/proc/sys/net", routeLocalnet(link, "").Path))
	return err == nil && strings.TrimSpace(string(value)) == openedByUs
}

// CloseLoopback disables route_localnet on each link on which Podlace enabled it.
func CloseLoopback(host *kernel.Node) error {
	links, err := openedLinks(host)
	for _, link := range links {
		err = errors.Join(err, host.Set(routeLocalnet(link, "0")))
	}
	return err
}

// restoreLoopback restores the rules that protect 127.0.0.0/8 while a link has route_localnet. Without records and hostPorts in the kernel,
// it disables route_localnet on all links and removes the rules. users are the hashes of the recorded attachments. Callers hold portsLock.
func restoreLoopback(host *kernel.Node, users []string) error {
	links, err := openedLinks(host)
	if err == nil && len(links) > 0 {
		err = restoreProtection(host, slog.Default())
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
	return nft.DelTable(nft.TableOf(nft.LoopbackTable))
}

// forgetUsers removes the files in loopbackUsers of all attachments but users, and empty folders.
func forgetUsers(users []string) error {
	keep := map[string]bool{}
	for _, owner := range users {
		keep[owner] = true
	}
	links, err := readNames(loopbackUsers, -1)
	for _, link := range links {
		folder := filepath.Join(loopbackUsers, link)
		owners, e := readNames(folder, -1)
		err = errors.Join(err, e)
		for _, owner := range owners {
			if !keep[owner] {
				err = errors.Join(err, forgetUser(owner, []string{link}))
			}
		}
		_, e = removeEmpty(folder)
		err = errors.Join(err, e)
	}
	return err
}

// anyLink is for callers that do not know on which link route_localnet was enabled.
const anyLink = "*"

// closeLoopback undoes OpenLoopback for one attachment and link, and is a no-op if link is "". It disables route_localnet if no other
// attachment uses the link. last is true once no link has route_localnet from Podlace, so that the protection of 127.0.0.0/8 may go.
// Callers hold portsLock and afterwards call forgetUser for the returned links.
func closeLoopback(host *kernel.Node, owner, link string) (users []string, last bool, err error) {
	links := []string{link, foreignPrefix + link}
	switch link {
	case "":
		return nil, false, nil
	case anyLink:
		if links, err = readNames(loopbackUsers, -1); err != nil {
			return nil, false, err
		}
	}
	// A killed process may have left an empty folder in loopbackUsers.
	links = slices.DeleteFunc(links, func(link string) bool {
		removed, e := removeEmpty(filepath.Join(loopbackUsers, link))
		err = errors.Join(err, e)
		return removed
	})
	if err != nil {
		return nil, false, err
	}
	ending := 0
	for _, link := range links {
		folder := filepath.Join(loopbackUsers, link)
		if _, err := os.Lstat(filepath.Join(folder, owner)); err != nil {
			continue
		}
		users = append(users, link)
		few, err := readNames(folder, 2)
		if err != nil {
			return nil, false, err
		}
		if len(few) > 1 {
			continue
		}
		ending++
		if strings.HasPrefix(link, foreignPrefix) {
			continue
		}
		if err := host.Set(routeLocalnet(link, "0")); err != nil {
			return nil, false, err
		}
	}
	if few, err := readNames(loopbackUsers, ending+1); err != nil || len(few) > ending {
		return users, false, err
	}
	last, err = closeUnused(host, owner)
	return users, last, err
}

// forgetUser removes the attachment's files from the folders of the given links in loopbackUsers, and empty folders.
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

// removeEmpty removes a folder without files, and reports whether there is none afterwards.
func removeEmpty(folder string) (removed bool, err error) {
	few, err := store.Names(folder, 1)
	if err != nil || len(few) > 0 {
		return errors.Is(err, fs.ErrNotExist), fault.Ignore(err, fs.ErrNotExist)
	}
	err = fault.Change("remove "+folder, func() error { return fault.Ignore(os.Remove(folder), unix.ENOTEMPTY, fs.ErrNotExist) })
	return err == nil, err
}

// closeUnused disables route_localnet if no other attachment has hostPorts. It asks the kernel, because records can be lost. Until then,
// route_localnet and the protection of 127.0.0.0/8 stay.
func closeUnused(host *kernel.Node, owner string) (closed bool, err error) {
	links, err := openedLinks(host)
	if err != nil || len(links) == 0 {
		return err == nil, err
	}
	owners, err := listOwners(host)
	if err != nil || slices.ContainsFunc(owners, func(o portOwner) bool { return o.Hash != owner }) {
		return false, err
	}
	return true, CloseLoopback(host)
}

// readNames returns at most so many names in a folder, or all if most is less than 1. A missing folder has none.
func readNames(folder string, most int) ([]string, error) {
	list, err := store.Names(folder, most)
	return list, fault.Ignore(err, fs.ErrNotExist)
}

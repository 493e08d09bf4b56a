// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/store"
)

// loopbackTable keeps the network from the node's 127.0.0.0/8, for as long as a link has route_localnet.
const loopbackTable = "podlace_loopback"

// loopbackSchema is the version of the table.
const loopbackSchema = 1

// protectPriority is that of the raw table: before connection tracking.
const protectPriority = -300

// loopbackUsers has a folder for each link with route_localnet, and in it a file for each attachment that needs it.
var loopbackUsers = filepath.Join(store.Root, ".localhost")

// foreign begins the folder of a link whose route_localnet is not ours to switch off. No link has a colon in its name.
const foreign = "foreign:"

// buildLoopback writes rules that drop what comes from the network for 127.0.0.0/8 or claims to be from there. A hostPort on 127.0.0.1
// needs route_localnet on the pods' interface, with which every pod could otherwise reach what listens on the node's loopback.
func buildLoopback(c *nftables.Conn) error {
	r := newRuleset(c, tableOf(loopbackTable).netlink())
	chain := r.chain("prerouting", nftables.ChainHookPrerouting, protectPriority, nftables.ChainTypeFilter)
	notLo := []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: ifname("lo")}}
	for _, offset := range []uint32{ipv4.source, ipv4.destination} {
		// Every packet comes here: what nearly none has is looked at first.
		r.rule(chain, join(ipv4.only(), loopback(offset), notLo, drop())...)
	}
	return r.mark(loopbackSchema)
}

// loopback matches an IPv4 address in 127.0.0.0/8.
func loopback(offset uint32) []expr.Any {
	return []expr.Any{network(1, offset, 1), equal([]byte{127})}
}

func (n *Node) marked(table string, version uint16) (bool, error) {
	t, err := n.openNFT(table)
	if err != nil {
		return false, err
	}
	return t.marked(version)
}

// loopbackProtected tells whether the protection is there, or nobody needs it.
func (n *Node) loopbackProtected() (bool, error) {
	if users, err := names(loopbackUsers, 1); err != nil || len(users) == 0 {
		return true, err
	}
	return n.marked(loopbackTable, loopbackSchema)
}

// ProtectLoopback drops what comes from elsewhere for 127.0.0.0/8.
func (n *Node) ProtectLoopback() error {
	if ok, err := n.marked(loopbackTable, loopbackSchema); ok || err != nil {
		return err
	}
	return skeleton("nft add table "+loopbackTable, buildLoopback)
}

// OpenLoopback lets the node's 127.0.0.1 reach the pods behind a link, for the attachment with the hash owner. The node's own loopback is
// protected from them first. Callers hold a lock against one another.
func (n *Node) OpenLoopback(owner, link string) error {
	setting := Sysctl{Path: "ipv4/conf/" + link + "/route_localnet", Value: "1"}
	name := link
	if _, err := os.Stat(filepath.Join(loopbackUsers, link)); err != nil {
		// With the table and without any user it is ours: the records are lost.
		users, err := names(loopbackUsers, 1)
		orphaned := false
		if err == nil && len(users) == 0 {
			orphaned, err = n.marked(loopbackTable, loopbackSchema)
		}
		if err != nil {
			return err
		}
		if on, _ := n.Get(setting.Path); on == setting.Value && !orphaned {
			name = foreign + link
		}
	}
	// The file comes first: by it all is taken back.
	users, err := store.Make(filepath.Join(loopbackUsers, name), 0o700)
	if err != nil {
		return err
	}
	defer users.Close()
	if err := users.Create(owner, nil, 0o600); err != nil && !errors.Is(err, fs.ErrExist) {
		_ = os.Remove(users.Path())
		return err
	}
	if err := n.ProtectLoopback(); err != nil {
		return err
	}
	return n.Set(setting)
}

// anyLink is for who does not know which one was opened.
const anyLink = "*"

// closeLoopback ends what OpenLoopback began for the owner on a link, "" for none: the last one of a link switches route_localnet off. last
// tells that no link is left, so that the protection may go; after that finish has to be called. Callers hold the lock of OpenLoopback.
func (n *Node) closeLoopback(owner, link string) (last bool, finish func() error, err error) {
	finish = func() error { return nil }
	if link == "" {
		return false, finish, nil
	}
	links := []string{link, foreign + link}
	if link == anyLink {
		if links, err = names(loopbackUsers, -1); err != nil {
			return false, finish, err
		}
	}
	// A folder without users is of somebody who was killed.
	links = slices.DeleteFunc(links, func(link string) bool { return os.Remove(filepath.Join(loopbackUsers, link)) == nil })
	ending := 0
	for _, link := range links {
		users := filepath.Join(loopbackUsers, link)
		if _, err := os.Lstat(filepath.Join(users, owner)); err != nil {
			continue
		}
		few, err := names(users, 2)
		if err != nil {
			return false, finish, err
		}
		only := len(few) == 1
		if only && !strings.HasPrefix(link, foreign) {
			if err := n.Set(Sysctl{Path: "ipv4/conf/" + link + "/route_localnet", Value: "0"}); err != nil {
				return false, finish, err
			}
		}
		if only {
			ending++
		}
		before := finish
		finish = func() error {
			return errors.Join(before(), change("forget a user of 127.0.0.1 on "+link, func() error {
				err := ignore(os.Remove(filepath.Join(users, owner)), fs.ErrNotExist)
				if err == nil && only {
					err = ignore(os.Remove(users), unix.ENOTEMPTY, fs.ErrNotExist)
				}
				return err
			}))
		}
	}
	few, err := names(loopbackUsers, ending+1)
	return len(few) == ending, finish, err
}

// names returns at most so many names of a folder, which may be missing; all if less than 1 are wanted.
func names(folder string, most int) ([]string, error) {
	f, err := os.Open(folder)
	if err != nil {
		return nil, ignore(err, fs.ErrNotExist)
	}
	defer f.Close()
	list, err := f.Readdirnames(most)
	return list, ignore(err, io.EOF)
}

// SPDX-License-Identifier: Apache-2.0

package rollback

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/portmap"
	"github.com/podlace/podlace/pkg/reconcile"
)

// Leftovers removes what Podlace keeps on a node that belongs to no pod: bridges without ports, nftables tables, lease folders without
// leases, records and locks. networks are those of Podlace, others those that the runtime has now. No pod of Podlace may be left. A step
// that fails does not keep the others from being done.
func Leftovers(networks, others []reconcile.Network, say func(string)) error {
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	l := leftovers{host: host, say: say}
	for _, n := range networks {
		l.note(l.bridge(n, others))
		if slices.ContainsFunc(others, func(o reconcile.Network) bool { return o.Name == n.Name }) {
			l.note(hostlocal.RemoveIndex(n.Name, n.DataDir())) // it continues the leases
			continue
		}
		if removed, err := hostlocal.RemoveFolder(n.Name, n.DataDir()); removed != "" || err != nil {
			l.did("removed "+removed, err)
		}
		for _, path := range reconcile.Forget(n.Name) {
			say("removed " + path)
		}
	}
	l.tables()
	if len(l.errs) == 0 {
		l.note(attachment.Clear())
	}
	return errors.Join(l.errs...)
}

type leftovers struct {
	host *kernel.Node
	say  func(string)
	errs []error
}

func (l *leftovers) note(err error) { l.errs = append(l.errs, nonNil(err)...) }

func nonNil(err error) []error {
	if err == nil {
		return nil
	}
	return []error{err}
}

// did says what was done.
func (l *leftovers) did(text string, err error) {
	if l.note(err); err == nil {
		l.say(text)
	}
}

// bridge deletes the bridge of a network, unless it has ports or another network may use it.
func (l *leftovers) bridge(n reconcile.Network, others []reconcile.Network) error {
	conf := n.Plugin("bridge")
	if conf == nil {
		return nil
	}
	name := bridgeName(conf)
	link, ok, err := l.host.Link(name)
	if err != nil || !ok {
		return err
	}
	for _, o := range others {
		if o.Plugin("flannel") != nil || o.Plugin("bridge") != nil && bridgeName(o.Plugin("bridge")) == name {
			l.say(fmt.Sprintf("the bridge %s stays: %s may use it", name, o.File))
			return nil
		}
	}
	ports, err := l.host.Ports(link)
	if err != nil {
		return err
	}
	if len(ports) > 0 {
		l.say(fmt.Sprintf("the bridge %s stays: it has the ports %s", name, strings.Join(ports, " ")))
		return nil
	}
	l.did("removed the bridge "+name, l.host.DelLink(name))
	return nil
}

// bridgeName returns the bridge that a configuration of the plugin names.
func bridgeName(conf []byte) string { return plugin.Plain(bridge.NameIn(conf), reconcile.MaxName) }

// tables deletes the nftables tables. The protection of 127.0.0.0/8 stays where route_localnet cannot be switched off, as in a container.
func (l *leftovers) tables() {
	open, err := portmap.LoopbackOpen(l.host)
	if err == nil && open {
		if err = portmap.CloseLoopback(l.host); err == nil {
			open = false
		}
	}
	if open {
		l.say(fmt.Sprintf("the table %s and route_localnet stay until the node boots: %v", nft.LoopbackTable, err))
	} else {
		l.note(err)
	}
	tables, err := nft.Own()
	l.note(err)
	for _, t := range tables {
		if open && t.Name == nft.LoopbackTable {
			continue
		}
		l.did("removed the nftables table "+t.String(), nft.DelTable(t))
	}
}

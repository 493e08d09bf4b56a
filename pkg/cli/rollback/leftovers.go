// SPDX-License-Identifier: Apache-2.0

package rollback

import (
	"errors"
	"fmt"
	"strings"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/portmap"
)

// Leftovers removes Podlace's state that belongs to no pod: bridges without ports, nftables tables, lease folders without leases, records
// and locks. If one part fails, the others are still removed. networks are Podlace's, others those in the runtime's current configuration.
// The caller must ensure that no pod of Podlace exists.
func Leftovers(networks, others []reconcile.Network, say func(string)) error {
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	l := leftovers{host: host, say: say}
	for _, n := range networks {
		l.note(l.delBridge(n, others))
		if _, ok := reconcile.Named(others, n.Name); ok {
			l.note(hostlocal.RemoveBootFile(n.Name, n.DataDir())) // it continues the leases
			continue
		}
		if removed, err := hostlocal.RemoveFolder(n.Name, n.DataDir()); removed != "" || err != nil {
			l.report("removed "+removed, err)
		}
		for _, path := range reconcile.Forget(n.Name) {
			say("removed " + path)
		}
	}
	l.delTables()
	if errors.Join(l.errs...) == nil {
		l.note(attachment.Clear())
	}
	return errors.Join(l.errs...)
}

type leftovers struct {
	host *kernel.Node
	say  func(string)
	errs []error
}

func (l *leftovers) note(err error) { l.errs = append(l.errs, err) }

// report prints what was removed, or stores the error.
func (l *leftovers) report(text string, err error) {
	if l.note(err); err == nil {
		l.say(text)
	}
}

// delBridge deletes a network's bridge, unless it has ports or another network may use it.
func (l *leftovers) delBridge(n reconcile.Network, others []reconcile.Network) error {
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
	l.report("removed the bridge "+name, l.host.DelLink(name))
	return nil
}

// bridgeName returns the bridge in a configuration of the bridge plugin.
func bridgeName(conf []byte) string { return plugin.Plain(bridge.NameIn(conf), reconcile.MaxName) }

// delTables deletes Podlace's nftables tables. If route_localnet cannot be disabled, for example in a container, the rules that protect
// 127.0.0.0/8 stay.
func (l *leftovers) delTables() {
	open, err := portmap.LoopbackOpen(l.host)
	if err == nil && open {
		err = portmap.CloseLoopback(l.host)
		open = err != nil
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
		l.report("removed the nftables table "+t.String(), nft.DelTable(t))
	}
}

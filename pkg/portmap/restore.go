// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// recorded is an attachment that has ports.
type recorded struct {
	attachment.Record
	state
}

func (rec recorded) owner() string { return owner(rec.Key, rec.Pod) }

// Restore restores the hostPorts of all attachments of the node from the records, after a flush of the rules, and makes the protection of the
// node's 127.0.0.0/8 agree with them. It changes nothing that is in place.
func Restore(host *kernel.Node, log *slog.Logger) error {
	return restoreAll(host, log, attachment.Waiting)
}

func restoreAll(host *kernel.Node, log *slog.Logger, locks attachment.Locker) error {
	unlock, err := locks.Node(portsLock)
	if err != nil {
		return err
	}
	defer unlock()
	all, err := allRecorded()
	if err != nil {
		return err
	}
	if len(all) > 0 {
		err = restore(host, all, log)
	}
	return errors.Join(err, mendLoopback(host))
}

// restoreFlushed is restore for an ADD that found the rules missing: it writes them also when no other attachment has ports.
func restoreFlushed(host *kernel.Node, log *slog.Logger) error {
	all, err := allRecorded()
	if err != nil {
		return err
	}
	return restore(host, all, log)
}

// restore is Restore for a caller that holds the lock. One attachment that cannot be restored does not keep the others from it.
func restore(host *kernel.Node, all []recorded, log *slog.Logger) error {
	var errs []error
	var wanted []kernel.HostPorts
	var flows []kernel.HostPort
	for i := range all {
		errs = append(errs, openLoopback(host, all[i].Key, &all[i].state))
		ports := all[i].hostPorts(all[i].owner())
		ports.Netns = all[i].netns(all[i].Netns)
		wanted = append(wanted, ports)
		flows = append(flows, all[i].Ports...)
	}
	lacks, err := host.LacksHostPorts(wanted)
	if lacks && len(all) > 0 {
		log.Info("the rules of hostPorts were flushed and are restored from the records", "attachments", len(all))
	}
	if lacks {
		err = host.RestoreHostPorts(wanted)
	}
	if !kernel.NoNFT(err) {
		errs = append(errs, err)
	}
	changed, err := restoreIPTables(host, all, log)
	errs = append(errs, err)
	if lacks || changed {
		// The kernel remembers clients that sent meanwhile as talking to the node itself.
		delFlows(host, flows)
	}
	return errors.Join(errs...)
}

// allRecorded returns the attachments that have ports, the newest first. When two have the same port it is the newer's; a pod that is gone,
// or has not got its ports yet, has none.
func allRecorded() (all []recorded, err error) {
	records, err := attachment.All()
	slices.SortStableFunc(records, func(a, b attachment.Record) int { return b.Written.Compare(a.Written) })
	var seen portIndex
	for _, rec := range records {
		of := recorded{Record: rec}
		if rec.Plugin != "portmap" || json.Unmarshal(rec.State, &of.state) != nil || of.Ended || of.Begun || plugin.NetnsGone(rec.Netns) {
			continue
		}
		of.Ports = slices.DeleteFunc(of.Ports, func(p kernel.HostPort) bool {
			return p.Port == 0 || !p.To.IsValid() || seen.overlap(p)
		})
		if len(of.Ports) > 0 {
			seen.add(of.Ports)
			all = append(all, of)
		}
	}
	return all, err
}

// portIndex finds hostPorts in the way of another without a look at all of them, which are as many as the node has.
type portIndex struct {
	singles map[uint16][]kernel.HostPort
	ranges  []kernel.HostPort
}

func (x *portIndex) add(ports []kernel.HostPort) {
	for _, p := range ports {
		if p.Last != 0 {
			x.ranges = append(x.ranges, p)
			continue
		}
		if x.singles == nil {
			x.singles = map[uint16][]kernel.HostPort{}
		}
		x.singles[p.Port] = append(x.singles[p.Port], p)
	}
}

func (x *portIndex) overlap(p kernel.HostPort) bool {
	last := max(p.Port, p.Last)
	for port := int(p.Port); port <= int(last); port++ {
		if slices.ContainsFunc(x.singles[uint16(port)], p.Overlaps) {
			return true
		}
	}
	return slices.ContainsFunc(x.ranges, p.Overlaps)
}

// intact reports whether the rules that all pods share are in place, or no pod needs them. What cannot be read counts as intact. It reads no
// record unless the rules are missing or the backend is iptables.
func intact(host *kernel.Node, cfg Config) bool {
	ok, err := host.HostPortRules()
	if kernel.NoNFT(err) || err == nil && ok {
		return cfg.Backend != "iptables" || iptablesIntact(host)
	}
	if err != nil || kernel.LoopbackUsed() {
		return err != nil
	}
	some, err := attachment.Any("portmap")
	return err != nil || !some
}

// claim is an ADD that asks for ports.
type claim struct {
	r    *plugin.Request
	host *kernel.Node
	gave []recorded // attachments that gave way
}

// yields decides about another attachment that has a port: it gives way when its pod is gone, and to a newer pod of the same name. Who is
// gone loses all.
func (c *claim) yields(other string, p kernel.HostPort) (loses kernel.HostPorts, err error) {
	hash := kernel.OwnerHash(other)
	rec, found, err := attachment.ByHash("portmap", hash)
	if err != nil {
		return loses, err
	}
	in := "hostPort %s is in use by %s"
	if !found {
		if o, ok, err := c.host.HostPortOwner(hash); err != nil || ok && plugin.NetnsGone(o.Netns) {
			return loses, err
		}
		return loses, plugin.WithHint(plugin.Errorf(plugin.CodePortConflict, in, p, kernel.OwnerName(other)),
			"its record is lost; DEL of its container ends it")
	}
	if rec.ContainerID == c.r.ContainerID { // in another network, or by another interface
		return loses, kernel.ErrShared
	}
	same, gone := rec.Pod != "" && rec.Pod == c.r.Pod.String(), plugin.NetnsGone(rec.Netns)
	if !same && !gone {
		return loses, plugin.Errorf(plugin.CodePortConflict, in, p, who(rec, other))
	}
	c.r.Log.Warn("a hostPort is taken over", "port", p.String(), "from", kernel.OwnerName(other), "container", rec.ContainerID, "samePod", same)
	gave := recorded{Record: rec}
	if err := json.Unmarshal(rec.State, &gave.state); err == nil && !slices.ContainsFunc(c.gave, func(o recorded) bool { return o.Key == rec.Key }) {
		c.gave = append(c.gave, gave)
	}
	if gone {
		loses = gave.hostPorts(other)
	}
	return loses, nil
}

// clear removes the iptables rules of those who gave way, which come before all others.
func (c *claim) clear() error {
	var errs []error
	for _, rec := range c.gave {
		if rec.Backend == "iptables" {
			errs = append(errs, c.host.RemoveChain(dnatChain, podChain(rec.Key)))
		}
	}
	return errors.Join(errs...)
}

// others tells who has a port, and whether it is shared: with another attachment of the same container.
func others(r *plugin.Request) func(owner string) (who string, shares bool) {
	return func(owner string) (string, bool) {
		rec, found, err := attachment.ByHash("portmap", kernel.OwnerHash(owner))
		if err != nil || !found {
			return kernel.OwnerName(owner), false
		}
		return who(rec, owner), rec.ContainerID == r.ContainerID
	}
}

// who names an owner so that it is told from an earlier pod of the same name.
func who(rec attachment.Record, owner string) string {
	return fmt.Sprintf("%s, container %s, since %s", kernel.OwnerName(owner), rec.ContainerID, rec.Written.UTC().Format(time.RFC3339))
}

// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/json"
	"errors"
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

// Restore brings back the hostPorts of all attachments of the node, after somebody flushed the rules. What is there is left alone.
func Restore(host *kernel.Node, log *slog.Logger) error {
	unlock, err := attachment.LockNode(portsLock)
	if err != nil {
		return err
	}
	defer unlock()
	return restore(host, log)
}

// restore is Restore for who holds the lock. One attachment that cannot be restored does not keep the others from it.
func restore(host *kernel.Node, log *slog.Logger) error {
	all, err := allRecorded()
	if err != nil || len(all) == 0 {
		return err
	}
	log.Info("hostPorts are restored from the records", "attachments", len(all))
	var errs []error
	var wanted []kernel.HostPorts
	for _, rec := range all {
		errs = append(errs, openLoopback(host, rec.Key, rec.state))
		wanted = append(wanted, rec.hostPorts(rec.owner()))
	}
	if err := host.RestoreHostPorts(wanted); !kernel.NoNFT(err) {
		errs = append(errs, err)
	}
	return errors.Join(append(errs, restoreIPTables(host, all))...)
}

// allRecorded returns the attachments that have ports. The newest comes first: when two want the same port, it has it.
func allRecorded() ([]recorded, error) {
	records, err := attachment.All()
	var all []recorded
	for _, rec := range records {
		of := recorded{Record: rec}
		if rec.Plugin != "portmap" || json.Unmarshal(rec.State, &of.state) != nil || of.Ended {
			continue
		}
		all = append(all, of)
	}
	slices.SortStableFunc(all, func(a, b recorded) int { return b.Written.Compare(a.Written) })
	return all, err
}

// intact tells whether the rules that all pods share are there, or nobody needs them.
func intact(host *kernel.Node, cfg Config) bool {
	if ok, err := host.HostPortRules(); ok || err != nil {
		return cfg.Backend != "iptables" || iptablesIntact(host)
	}
	all, err := allRecorded()
	return err == nil && len(all) == 0
}

// claim is an ADD that asks for ports.
type claim struct {
	r    *plugin.Request
	host *kernel.Node
	gave []recorded // attachments that gave way
}

// yields decides about another attachment that has a port: it gives way when its pod is gone, and to a newer pod of the same name.
func (c *claim) yields(other string, p kernel.HostPort) error {
	rec, found, err := attachment.ByHash("portmap", kernel.OwnerHash(other))
	if err != nil {
		return err
	}
	in := "hostPort %s is in use by %s"
	if !found {
		return plugin.WithHint(plugin.Errorf(plugin.CodePortConflict, in, p, kernel.OwnerName(other)),
			"its record is lost; DEL of its container ends it")
	}
	same := rec.Pod != "" && rec.Pod == c.r.Pod.String()
	if !same && !plugin.NetnsGone(rec.Netns) {
		return plugin.Errorf(plugin.CodePortConflict, in+", container %s, since %s", p, kernel.OwnerName(other), rec.ContainerID, rec.Written.UTC().Format(time.RFC3339))
	}
	c.r.Log.Warn("a hostPort is taken over", "port", p.String(), "from", kernel.OwnerName(other), "container", rec.ContainerID, "samePod", same)
	gave := recorded{Record: rec}
	if err := json.Unmarshal(rec.State, &gave.state); err == nil && !slices.ContainsFunc(c.gave, func(o recorded) bool { return o.Key == rec.Key }) {
		c.gave = append(c.gave, gave)
	}
	return nil
}

// clear removes the iptables rules of those who gave way, which come before all others.
func (c *claim) clear() error {
	var errs []error
	for _, rec := range c.gave {
		if rec.Backend == "iptables" {
			errs = append(errs, delByIPTables(c.host, rec.Key, rec.Ports))
		}
	}
	return errors.Join(errs...)
}

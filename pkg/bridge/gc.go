// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func (b bridge) gc(r *plugin.Request) error {
	errs := []error{attachment.Collect(r, b.removeAs(r)), attachment.CollectUnreadable(r, removeByHash)}
	if t := ipam.Type(ipam.Object(r.Config)); t != "" {
		errs = append(errs, b.ipam.GC(r, t))
	}
	attachment.Repair(r, attachment.Waiting, func(locks attachment.Locker) error {
		return kernel.WithHost(func(host *kernel.Node) error { return restoreAll(host, r.Log, locks) })
	})
	return errors.Join(errs...)
}

// removeByHash takes away the link of an attachment of which only the hash of the key is known. Its addresses go back with the other leases
// that are nobody's.
func removeByHash(hash string) error {
	return kernel.WithHost(func(host *kernel.Node) error {
		return errors.Join(host.DelGroup(attachment.HostVeth(hash), 0), host.DelGuardOf(attachment.HostVeth(hash)))
	})
}

// removeAs returns DEL for attachments other than the one that r is about.
func (b bridge) removeAs(r *plugin.Request) func(*attachment.Attachment, state) error {
	config := r.ConfigForDel()
	return func(att *attachment.Attachment, st state) error {
		of := *r
		of.Config, of.Verb, of.ContainerID, of.IfName, of.Hold = config, "DEL", att.ContainerID, att.IfName, att.LockFile()
		return b.removeFromNode(&of, att, st)
	}
}

// allocate asks the IPAM plugin for addresses. A pool that is short may be so because a runtime never called DEL for pods that are gone.
// One in process has given us their addresses and says whose they were; for another they are given back, and it is asked once more.
func (b bridge) allocate(j *job) (*types100.Result, error) {
	var dead []plugin.Attachment
	j.r.Reclaimed = func(of plugin.Attachment) { dead = append(dead, of) }
	result, err := b.ipam.Add(j.r, j.cfg.IPAM)
	if plugin.Code(err) != plugin.CodeExhausted || err == nil {
		b.collectDead(j, dead)
		return result, err
	}
	records, listErr := attachment.List(j.r.Network, j.r.Plugin)
	if listErr != nil {
		return nil, errors.Join(err, listErr)
	}
	for _, rec := range records {
		if rec.Key != j.att.Key && plugin.NetnsGone(rec.Netns) {
			dead = append(dead, rec.Attachment())
		}
	}
	if b.collectDead(j, dead) == 0 {
		return nil, err
	}
	return b.ipam.Add(j.r, j.cfg.IPAM)
}

// removeDead is removeAs for what is gone by its record alone. The container may live in another namespace, by another program, with
// leases that are younger than the record.
func (b bridge) removeDead(r *plugin.Request) func(*attachment.Attachment, state) error {
	return func(att *attachment.Attachment, st state) error {
		written, err := att.Written()
		if err != nil {
			return err
		}
		as := *r
		as.NotAfter = written
		return b.removeAs(&as)(att, st)
	}
}

// collectDead removes attachments whose namespace is gone, and returns how many. Nobody else takes the lock of one of these while he
// holds another's but an ADD that does the same, and none of them is what any ADD is about: so no two wait for each other.
func (b bridge) collectDead(j *job, dead []plugin.Attachment) int {
	n := 0
	for _, of := range dead {
		found, err := attachment.DropDead(j.r, of, b.removeDead(j.r))
		if err != nil {
			j.r.Log.Warn("could not collect a pod that is gone", "of", of.ContainerID, "ifname", of.IfName, "error", err)
		} else if found {
			j.r.Log.Warn("collected a pod that is gone", "of", of.ContainerID, "ifname", of.IfName)
			n++
		}
	}
	return n
}

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
	host, err := attachment.Host(r)
	if err != nil {
		return err
	}
	config := r.ConfigForDel()
	gc := attachment.NewGC[state](r)
	for att, st := range gc.Stale() {
		gc.Report(att, b.remove(delOf(r, config, att), att, host, st))
	}
	for hash := range gc.Unreadable() {
		// The IPAM plugin's GC releases the addresses of unreadable records.
		gc.ReportUnreadable(hash, delByHash(host, attachment.HostVeth(hash)))
	}
	err = gc.Err()
	if t := ipam.Type(ipam.Object(r.Config)); t != "" {
		err = errors.Join(err, b.ipam.GC(r, t))
	}
	attachment.ReportRestore(r, attachment.Waiting, errors.Join(RenewClusterCIDRs(r.Log), Restore(host, r.Log, attachment.Waiting)))
	return err
}

// delByHash removes the links and rules whose names contain the hash of an unreadable record. ADD writes the record before it creates the
// veth pair, so a pair with the hash of an existing record is Podlace's.
func delByHash(host *kernel.Node, name string) error {
	link, ok, err := host.Link(name)
	if ok && link.Kind == "veth" {
		err = host.DelGroup(link)
	}
	return errors.Join(err, delGuardOf(host, name))
}

// delOf derives a DEL request for another attachment from r.
func delOf(r *plugin.Request, config []byte, att *attachment.Attachment) *plugin.Request {
	of := *r
	of.Config, of.Verb, of.ContainerID, of.IfName, of.LockFile = config, "DEL", att.ContainerID, att.IfName, att.LockFile()
	return &of
}

// allocate gets addresses from the IPAM plugin. If the pool is exhausted or a requested address is taken, dead pods may be the cause, for
// which the runtime never called DEL, so allocate removes those of the network and tries again.
func (b bridge) allocate(j *job) (*types100.Result, error) {
	result, err := b.ipam.Add(j.r, j.cfg.IPAM)
	if code := plugin.Code(err); err == nil || code != plugin.CodeExhausted && code != plugin.CodeAddressTaken {
		return result, err
	}
	records, listErr := attachment.List(j.r.Network, j.r.Plugin)
	if listErr != nil {
		return nil, errors.Join(err, listErr)
	}
	var dead []plugin.Attachment
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

// collectDead removes attachments whose namespace is gone, and returns their number. Only for this does a process lock a second attachment,
// which cannot deadlock, because no ADD holds the lock of a dead one.
func (b bridge) collectDead(j *job, dead []plugin.Attachment) int {
	n := 0
	for _, of := range dead {
		found, err := b.removeDead(j, of)
		if err != nil {
			j.r.Log.Warn("could not collect a pod that is gone", "of", of.ContainerID, "ifname", of.IfName, "error", err)
		} else if found {
			j.r.Log.Warn("collected a pod that is gone", "of", of.ContainerID, "ifname", of.IfName)
			n++
		}
	}
	return n
}

// removeDead removes a dead attachment by its record. The reference plugin, for example, may have attached the container again in a new
// namespace; leases that are newer than the record belong to that attachment.
func (b bridge) removeDead(j *job, of plugin.Attachment) (found bool, err error) {
	att, st, found, err := attachment.TakeDead[state](j.r, of)
	if err != nil || !found {
		return false, err
	}
	defer att.Close()
	as := delOf(j.r, j.r.ConfigForDel(), att)
	if as.NotAfter, err = att.Written(); err != nil {
		return true, err
	}
	return true, b.remove(as, att, j.host, st)
}

// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"errors"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

func del(r *plugin.Request) error {
	restoreFlushedProtection(r, false)
	att, st, recorded, err := attachment.Take[portState](r)
	if err != nil {
		return err
	}
	defer att.Close()
	host, err := attachment.Host(r)
	if err != nil {
		return err
	}
	if recorded {
		return removePorts(host, att, st)
	}
	return errors.Join(delUnrecorded(r, host), att.Remove())
}

func gc(r *plugin.Request) error {
	host, err := attachment.Host(r)
	if err != nil {
		return err
	}
	gc := attachment.NewGC[portState](r)
	for att, st := range gc.Stale() {
		gc.Report(att, removePorts(host, att, st))
	}
	for hash := range gc.Unreadable() {
		_, err := endUnrecorded(host, hash)
		gc.ReportUnreadable(hash, err)
	}
	err = errors.Join(gc.Err(), collectUnrecorded(host))
	attachment.ReportRestore(r, attachment.Waiting, restoreAll(host, r.Log, attachment.Waiting))
	return err
}

// collectUnrecorded removes the hostPorts of dead pods without a record.
func collectUnrecorded(host *kernel.Node) error {
	owners, err := listOwners(host)
	errs := []error{err}
	for _, o := range owners {
		if !plugin.NetnsGone(o.Netns) {
			continue
		}
		_, found, err := attachment.ByHash("portmap", o.Hash)
		if err == nil && !found {
			_, err = endUnrecorded(host, o.Hash)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// removePorts ends the forwarding, whatever the current configuration. The record is marked as ended first and deleted last, so that a
// process that restores all ports meanwhile skips this attachment.
func removePorts(host *kernel.Node, att *attachment.Attachment, st portState) error {
	if err := endForwarding(host, att.Key, st, att); err != nil {
		return err
	}
	endFlows(host, st.Ports)
	return att.Remove()
}

// endForwarding ends the forwarding of an attachment, after it gave ports with heirsMark to other attachments that request them. With att,
// it then marks the record as ended.
func endForwarding(host *kernel.Node, key attachment.Key, st portState, att *attachment.Attachment) error {
	unlock, err := attachment.Waiting.Node(portsLock)
	if err != nil {
		return err
	}
	defer unlock()
	all := st.hostPorts(ownerComment(key, ""))
	own, err := ownedBy(host, all)
	if err == nil && slices.ContainsFunc(own, mayPass) {
		var ending ports.Index
		ending.Add(key.Hash(), st.Ports...)
		if err = moveToHeirs(host, key.Hash(), &ending); err == nil {
			own, err = ownedBy(host, all)
		}
	}
	if err == nil {
		err = endPorts(host, key, st, own)
	}
	if err == nil && att != nil {
		st.Ended = true
		att.SaveProgress(st)
	}
	return err
}

func mayPass(e nft.Element) bool { return strings.HasSuffix(e.Comment, heirsMark) }

// endPorts undoes ADD in reverse order, the protection of 127.0.0.1 last. The elements go in one transaction, so that all ports become free
// for other pods at once.
func endPorts(host *kernel.Node, key attachment.Key, st portState, own []nft.Element) error {
	if st.Backend == "iptables" {
		if err := iptables.RemoveChain(dnatChain, podChain(key)); err != nil {
			return err
		}
	}
	return endOwned(host, key.Hash(), st.Localhost, own)
}

// delUnrecorded removes the state of an attachment whose record is lost, or that the reference plugin created.
func delUnrecorded(r *plugin.Request, host *kernel.Node) error {
	lost, err := endUnrecorded(host, attachment.KeyOf(r).Hash())
	if err == nil && !lost && requestsPorts(r) {
		// Without record and rules, the pod's network may still reach 127.0.0.1.
		err = restoreLoopbackLocked(host)
	}
	if err != nil {
		return err
	}
	return delReference(r, lost)
}

// endUnrecorded removes the hostPorts of an attachment without a record, found by the hash of its key. lost is true if there were any.
func endUnrecorded(host *kernel.Node, hash string) (lost bool, err error) {
	if _, lost, err = findOwner(host, hash); err != nil || !lost {
		return lost, err
	}
	unlock, err := attachment.Waiting.Node(portsLock)
	if err != nil {
		return true, err
	}
	defer unlock()
	if err := moveToHeirs(host, hash, nil); err != nil {
		return true, err
	}
	ports, err := delOwnedHostPorts(host, hash)
	if err == nil {
		endFlows(host, ports)
	}
	return true, err
}

// restoreLoopbackLocked calls restoreLoopback under portsLock.
func restoreLoopbackLocked(host *kernel.Node) error {
	if open, err := LoopbackOpen(host); err != nil || !open && !loopbackUsed() {
		return err
	}
	unlock, err := attachment.Waiting.Node(portsLock)
	if err != nil {
		return err
	}
	defer unlock()
	return restoreRecordedLoopback(host)
}

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

// collectUnrecorded removes the hostPorts of dead pods for which no record exists.
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

// removePorts ends the forwarding, regardless of the current configuration. removePorts first marks the record as ended, and at the very
// end deletes the record. If another process restores the ports of all pods at this time, it sees the mark and does not restore the ports
// of this attachment.
func removePorts(host *kernel.Node, att *attachment.Attachment, st portState) error {
	if err := endForwarding(host, att.Key, st, att); err != nil {
		return err
	}
	endFlows(host, st.Ports)
	return att.Remove()
}

// endForwarding ends the forwarding of an attachment. If another attachment requests some of the ports, endForwarding first gives these
// ports to that attachment. endForwarding looks for such an attachment only if an element of the ports has heirsMark. If the argument "att"
// is not nil, endForwarding then marks the record as ended.
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

// endPorts removes the state in the reverse order of ADD, and the protection of 127.0.0.1 last. The given elements of the attachment are
// removed in one transaction, so that all ports become free for other pods at the same time.
func endPorts(host *kernel.Node, key attachment.Key, st portState, own []nft.Element) error {
	if st.Backend == "iptables" {
		if err := iptables.RemoveChain(dnatChain, podChain(key)); err != nil {
			return err
		}
	}
	return endOwned(host, key.Hash(), st.Localhost, own)
}

// delUnrecorded removes the state of an attachment without a record. Either the record of this attachment is lost, or the reference plugin
// created the attachment.
func delUnrecorded(r *plugin.Request, host *kernel.Node) error {
	lost, err := endUnrecorded(host, attachment.KeyOf(r).Hash())
	if err == nil && !lost && requestsPorts(r) {
		// If both the record and the rules are lost, the network of this pod may still have access to 127.0.0.1.
		err = restoreLoopbackLocked(host)
	}
	if err != nil {
		return err
	}
	return delReference(r, lost)
}

// endUnrecorded removes the hostPorts of an attachment that has no record. endUnrecorded finds the hostPorts by the hash of the
// attachment's key. The first result of endUnrecorded is true if the attachment has hostPorts.
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

// restoreLoopbackLocked takes the lock portsLock and calls restoreLoopback.
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

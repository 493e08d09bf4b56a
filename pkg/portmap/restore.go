// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"errors"
	"log/slog"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// recordedPorts is an attachment with ports, read from its record.
type recordedPorts struct {
	attachment.Record
	portState
	shared []ports.Port // ports that an older attachment of its container forwards
	heirs  bool         // another attachment of its container or pod has ports
}

func (rec recordedPorts) owner() string { return ownerComment(rec.Key, rec.Pod) }

// wantedPorts returns the state that the attachment should have in nf_tables.
func (rec recordedPorts) wantedPorts() ownedPorts {
	ports := rec.hostPorts(rec.owner())
	ports.Netns, ports.Shared, ports.HasHeirs = rec.netnsPath(rec.Netns), rec.shared, rec.heirs
	return ports
}

// Restore restores the hostPorts of all attachments from their records, for example after a flush, and the rules that protect 127.0.0.0/8;
// it removes these if no attachment needs them. Only missing or wrong state changes.
func Restore(host *kernel.Node, log *slog.Logger) error {
	return restoreAll(host, log, attachment.Waiting)
}

// restoreAll implements Restore for 'podlace reload', GC and STATUS.
func restoreAll(host *kernel.Node, log *slog.Logger, locks attachment.Locker) error {
	if used, err := inUse(host); err != nil || !used {
		return err
	}
	unlock, err := locks.Node(portsLock)
	if err != nil {
		return locks.Tolerate(err)
	}
	defer unlock()
	all, err := allRecorded()
	if err != nil {
		return err
	}
	if len(all) > 0 {
		err = restorePorts(host, all, log, locks)
	}
	return errors.Join(err, restoreRecordedLoopback(host))
}

// inUse reports whether the node has a record of hostPorts or a link on which Podlace enabled route_localnet.
func inUse(host *kernel.Node) (bool, error) {
	if loopbackUsed() {
		return true, nil
	}
	if recorded, err := attachment.Any("portmap"); err != nil || recorded {
		return recorded, err
	}
	return LoopbackOpen(host)
}

// restorePorts is the part of restoreAll under the lock, for example for an ADD that found the rules missing. An attachment that cannot be
// restored does not stop the others.
func restorePorts(host *kernel.Node, all []recordedPorts, log *slog.Logger, locks attachment.Locker) error {
	var errs []error
	if loopbackUsed() {
		errs = append(errs, ignoreNoNFT(restoreProtection(host, log)))
	}
	var wanted []ownedPorts
	var flows []ports.Port
	for i := range all {
		errs = append(errs, openLoopback(host, all[i].Key, &all[i].portState))
		wanted = append(wanted, all[i].wantedPorts())
		flows = append(flows, all[i].Ports...)
	}
	lacked, err := restoreTable(host, wanted)
	if lacked && len(all) > 0 {
		log.Info("rules of hostPorts are missing and are restored from the records", "attachments", len(all))
	}
	errs = append(errs, ignoreNoNFT(err))
	changed, err := restoreIPTables(all, locks == attachment.Waiting, log)
	errs = append(errs, locks.Tolerate(err))
	if lacked || changed {
		// Without the rules, packets of clients created conntrack entries to the node itself.
		endFlows(host, flows)
	}
	return errors.Join(errs...)
}

// ignoreNoNFT drops the error of a kernel without nftables, which has no rules to restore.
func ignoreNoNFT(err error) error {
	if nft.Unsupported(err) {
		return nil
	}
	return err
}

// allRecorded returns all attachments with ports, the newest first.
func allRecorded() ([]recordedPorts, error) { return recordedExcept("", "") }

// recordedExcept is allRecorded without the attachment of the given hash. A port that several pods request belongs to the newest of them,
// and to all requesting attachments of its container. Pods that are dead or whose ADD has not finished have no ports, except that a dead
// pod of the given container keeps its own.
func recordedExcept(hash, container string) (all []recordedPorts, err error) {
	records, err := attachment.AllOf("portmap")
	slices.SortStableFunc(records, func(a, b attachment.Record) int { return b.Written.Compare(a.Written) })
	var seen ports.Index
	attachments := map[string]int{} // of a container or a pod
	for _, rec := range records {
		st, e := attachment.StateOf[portState](rec)
		if e != nil || rec.Hash() == hash || st.Ended || st.Unfinished || rec.ContainerID != container && plugin.NetnsEnded(rec.Netns) {
			continue
		}
		attachments[rec.ContainerID]++
		attachments[rec.Pod]++
		of := recordedPorts{Record: rec, portState: st}
		of.Ports = slices.DeleteFunc(of.Ports, func(p ports.Port) bool {
			return p.Port == 0 || !p.To.IsValid() || seen.Overlap(p, rec.ContainerID)
		})
		if len(of.Ports) > 0 {
			seen.Add(rec.ContainerID, of.Ports...)
			all = append(all, of)
		}
	}
	var older ports.Index
	for i := len(all) - 1; i >= 0; i-- {
		all[i].heirs = attachments[all[i].ContainerID] > 1 || all[i].Pod != "" && attachments[all[i].Pod] > 1
		for _, p := range all[i].Ports {
			if older.Overlap(p, all[i].Hash()) {
				all[i].shared = append(all[i].shared, p)
			} else {
				older.Add(all[i].Hash(), p)
			}
		}
	}
	return all, err
}

// Intact reports whether the shared nftables rules are complete. That also holds if no attachment needs them or their state cannot be read.
// The records are read only if rules are missing.
func Intact(host *kernel.Node) bool {
	drift, err := rulesDrift(host)
	if err != nil || drift == "" {
		return true
	}
	used, err := inUse(host)
	return err != nil || !used
}

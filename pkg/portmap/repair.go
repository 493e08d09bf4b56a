// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/json"
	"errors"
	"log/slog"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// recorded is an attachment with ports.
type recorded struct {
	attachment.Record
	state
	shared []ports.Port // ports that an older attachment of its container forwards
}

func (rec recorded) owner() string { return owner(rec.Key, rec.Pod) }

// wanted returns the attachment's wanted state in nf_tables.
func (rec recorded) wanted() ownedPorts {
	ports := rec.hostPorts(rec.owner())
	ports.Netns, ports.Shared = rec.netns(rec.Netns), rec.shared
	return ports
}

// Restore restores the hostPorts of all attachments of the node from the records, after a flush of the rules. It also updates the
// protection of the node's 127.0.0.0/8. It does not change existing state.
func Restore(host *kernel.Node, log *slog.Logger) error { return repair(host, log, attachment.Waiting) }

// repair is Restore for reload, GC and STATUS.
func repair(host *kernel.Node, log *slog.Logger, locks attachment.Locker) error {
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
		err = restore(host, all, log, locks)
	}
	return errors.Join(err, mendFromRecords(host))
}

// inUse reports whether the node has a record of hostPorts, or a link that is open for 127.0.0.1.
func inUse(host *kernel.Node) (bool, error) {
	if loopbackUsed() {
		return true, nil
	}
	if recorded, err := attachment.Any("portmap"); err != nil || recorded {
		return recorded, err
	}
	return LoopbackOpen(host)
}

// restore is repair for a caller that holds the lock, such as an ADD that found the rules missing. If one attachment cannot be restored, it
// continues with the others.
func restore(host *kernel.Node, all []recorded, log *slog.Logger, locks attachment.Locker) error {
	var errs []error
	if loopbackUsed() {
		errs = append(errs, ignoreNoNFT(protectAgain(host, log)))
	}
	var wanted []ownedPorts
	var flows []ports.Port
	for i := range all {
		errs = append(errs, openLoopback(host, all[i].Key, &all[i].state))
		wanted = append(wanted, all[i].wanted())
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
		// Clients that sent meanwhile have connection tracking entries for the node itself.
		endFlows(host, flows)
	}
	return errors.Join(errs...)
}

// ignoreNoNFT drops the error of a kernel without nftables, where nothing needs a restore.
func ignoreNoNFT(err error) error {
	if nft.Unsupported(err) {
		return nil
	}
	return err
}

// allRecorded returns the attachments with ports, the newest first.
func allRecorded() ([]recorded, error) { return recordedExcept("", "") }

// recordedExcept is allRecorded without the attachment whose key has the hash. Of two pods that ask for a port, the newer one has it.
// Attachments of one container share it. A dead pod has no ports, unless it belongs to container. A pod whose ADD has not finished has
// none.
func recordedExcept(hash, container string) (all []recorded, err error) {
	records, err := attachment.AllOf("portmap")
	slices.SortStableFunc(records, func(a, b attachment.Record) int { return b.Written.Compare(a.Written) })
	var seen ports.Index
	for _, rec := range records {
		of := recorded{Record: rec}
		if rec.Hash() == hash || json.Unmarshal(rec.State, &of.state) != nil || of.Ended || of.Begun ||
			rec.ContainerID != container && plugin.NetnsGone(rec.Netns) {
			continue
		}
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

// Intact reports whether the nftables rules that all pods share exist or are not needed. Unreadable state counts as intact. It reads no
// record unless the rules are missing.
func Intact(host *kernel.Node) bool {
	drift, err := rulesDrift(host)
	if err != nil || drift == "" {
		return true
	}
	used, err := inUse(host)
	return err != nil || !used
}

// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"errors"
	"io/fs"
	"log/slog"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/plugin"
)

// RestoreOrphans restores the VFs of ended pods, with a log line each, for runtimes that do not call GC. It skips VFs whose interface
// is not on the node and those of user space programs, because a pod may still use them, unless DEL has ended the attachment; the next ADD
// checks these. RestoreOrphans needs CAP_NET_ADMIN.
func RestoreOrphans(sysfs string, log *slog.Logger) error {
	all, err := Holdings()
	errs := []error{err}
	for _, j := range all {
		errs = append(errs, withJournal(sysfs, j.Address, log, restoreOrphan))
	}
	return errors.Join(errs...)
}

// restoreOrphan restores a VF if its interface is on the node or its attachment has ended. The VF's lock keeps others from moving the
// interface meanwhile.
func restoreOrphan(n *nodeSide, h *lockedVF, j Holding) error {
	c, err := n.readCard(j.Address)
	if isMissing(err) || err == nil && c.link.Index == 0 && !j.Ended {
		return nil
	}
	if err == nil {
		_, err = n.restoreVF(h, j)
	}
	if err == nil {
		n.r.Log.Info("restored a VF whose pod has ended", "vf", j.Address, "pod", j.Pod, "container", j.Owner.ContainerID)
	}
	return err
}

func (s sriov) gc(r *plugin.Request) error {
	r.DeferSignals()
	config := r.ConfigForDel()
	gc := attachment.NewGC[attachmentState](r)
	for att, st := range gc.Stale() {
		of := *r
		of.Config, of.Verb, of.ContainerID, of.IfName = config, "DEL", att.ContainerID, att.IfName
		gc.Report(att, s.removeFromNode(&of, att, st))
	}
	return errors.Join(gc.Err(), s.collectJournals(r), s.collectLeases(r))
}

// collectJournals restores the VFs of stale attachments without a record.
func (s sriov) collectJournals(r *plugin.Request) error {
	all, err := Holdings()
	errs := []error{err}
	for _, j := range all {
		of := plugin.Attachment{ContainerID: j.Owner.ContainerID, IfName: j.Owner.IfName}
		if j.Owner.Network == r.Network && r.Stale(of, j.Netns, j.Since) {
			errs = append(errs, s.collectJournal(r, j))
		}
	}
	return errors.Join(errs...)
}

func (s sriov) collectJournal(r *plugin.Request, j Holding) error {
	att, err := attachment.Waiting.Key(j.Owner)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	defer att.Close()
	if records, err := attachment.RecordsOf(j.Owner, r.Plugin); err != nil || len(records) > 0 {
		return err // an ADD of the same key has started
	}
	n, err := openNode(s.sysfs, r)
	if err != nil {
		return err
	}
	defer n.host.Close()
	_, err = n.releaseVF(j.Owner, j.Address)
	return err
}

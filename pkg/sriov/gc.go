// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"errors"
	"io/fs"
	"log/slog"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
)

// Return brings VFs back whose pods have ended without a DEL, for runtimes that do not call GC, and tells of each. Those whose interface is
// somewhere else, and those that programs have, may be in use: the next ADD looks. It needs CAP_NET_ADMIN.
func Return(sysfs string, log *slog.Logger) error {
	all, err := journals()
	if err != nil || len(all) == 0 {
		return err
	}
	n, err := openNode(sysfs, &plugin.Request{Plugin: "sriov", Verb: "return", Log: log})
	if err != nil {
		return err
	}
	defer n.host.Close()
	var errs []error
	for _, j := range all {
		errs = append(errs, n.returned(j.Address))
	}
	return errors.Join(errs...)
}

// returned brings a VF back that is at home, although an attachment has it. The lock excludes a process that is about to move it.
func (n *node) returned(a pci.Address) error {
	h, err := holdKnown(a)
	if h == nil {
		return err
	}
	defer h.close()
	j, ok, err := h.load()
	if err != nil || !ok {
		return err
	}
	c, err := n.read(a)
	if err != nil && !isGone(err) {
		return err
	}
	if c.link.Index == 0 {
		return nil
	}
	n.r.Log.Info("bringing a VF back whose pod has ended", "vf", a, "pod", j.Pod, "container", j.Owner.ContainerID)
	return n.restore(h, j)
}

func (s sriov) gc(r *plugin.Request) error {
	r.Patient()
	config := r.ConfigForDel()
	gc := attachment.NewGC[state](r)
	for att, st := range gc.Stale() {
		of := *r
		of.Config, of.Verb, of.ContainerID, of.IfName = config, "DEL", att.ContainerID, att.IfName
		gc.Report(att, s.removeFromNode(&of, att, st))
	}
	return errors.Join(gc.Err(), s.collectJournals(r), s.collectLeases(r))
}

// collectJournals brings VFs back whose attachment is not valid any more, and has no record either.
func (s sriov) collectJournals(r *plugin.Request) error {
	all, err := journals()
	errs := []error{err}
	for _, j := range all {
		of := plugin.Attachment{ContainerID: j.Owner.ContainerID, IfName: j.Owner.IfName}
		if j.Owner.Network != r.Network || !r.Stale(of, j.Netns, j.Since) {
			continue
		}
		errs = append(errs, s.collectJournal(r, j))
	}
	return errors.Join(errs...)
}

func (s sriov) collectJournal(r *plugin.Request, j journal) error {
	att, err := attachment.Waiting.Key(j.Owner)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	defer att.Close()
	if records, err := attachment.RecordsOf(j.Owner, r.Plugin); err != nil || len(records) > 0 {
		return err // an ADD that came meanwhile
	}
	n, err := openNode(s.sysfs, r)
	if err != nil {
		return err
	}
	defer n.host.Close()
	return n.release(j.Owner, vf{Address: j.Address, Name: j.Name}, j.Netns)
}

// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"errors"
	"io/fs"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/plugin"
)

// recorded tells whether an attachment has VFs.
func recorded(r *plugin.Request) bool { return attachment.Recorded(r) }

func (s sriov) gc(r *plugin.Request) error {
	r.Patient()
	return errors.Join(attachment.Collect(r, s.removeAs(r)), s.collectJournals(r), s.collectLeases(r))
}

// removeAs returns DEL for attachments other than the one that r is about.
func (s sriov) removeAs(r *plugin.Request) func(*attachment.Attachment, state) error {
	config := r.ConfigForDel()
	return func(att *attachment.Attachment, st state) error {
		of := *r
		of.Config, of.Verb, of.ContainerID, of.IfName = config, "DEL", att.ContainerID, att.IfName
		return s.removeFromNode(&of, att, st)
	}
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
	att, err := attachment.LockKey(j.Owner)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err != nil {
		return err
	}
	if att != nil {
		defer att.Close()
		if records, err := attachment.RecordsOf(j.Owner, r.Plugin); err != nil || len(records) > 0 {
			return err // an ADD that came meanwhile
		}
	}
	return s.onNode(r, func(n *node) error { return n.release(j.Owner, j.Address) })
}

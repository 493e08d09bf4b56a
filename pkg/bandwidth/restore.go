// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// Restore restores the limits of all live pods after another program removed a token bucket, an ifb device or a redirect, and replaces
// redirects that do not match short frames. Complete limits stay as they are. An error in one attachment does not stop the others.
func Restore(host *kernel.Node, log *slog.Logger) error {
	return errors.Join(restoreLimits(host, log, attachment.Waiting), restoreReferenceRedirects(host, log))
}

// restoreLimits restores the limits of all attachments that have records.
func restoreLimits(host *kernel.Node, log *slog.Logger, locks attachment.Locker) error {
	records, err := attachment.AllOf(pluginName)
	if err != nil {
		return err
	}
	records = slices.DeleteFunc(records, func(rec attachment.Record) bool { return !plugin.NetnsExists(rec.Netns) })
	if len(records) == 0 {
		return nil
	}
	buckets, err := host.Buckets()
	if err != nil {
		return err
	}
	var errs []error
	for _, rec := range records {
		if err := restore(host, rec.Key, buckets, log, locks); err != nil {
			errs = append(errs, fmt.Errorf("limits of container %s, %s in network %s: %w", rec.ContainerID, rec.IfName, rec.Network, err))
		}
	}
	return errors.Join(errs...)
}

// restore restores the limits of one attachment. It reads the record again under the lock, since the pod may have new limits or be gone.
func restore(host *kernel.Node, key attachment.Key, buckets map[int]kernel.Bucket, log *slog.Logger, locks attachment.Locker) error {
	att, rec, ok, err := attachment.Reopen[state](locks, key, pluginName)
	if err != nil || !ok {
		return locks.Tolerate(err)
	}
	defer att.Close()
	st := rec.State
	link, ok, err := st.hostSide(host)
	if err != nil {
		return err
	}
	if !ok {
		return fmt.Errorf("link %s is missing or was recreated: delete the pod, so that a new pod gets a link with limits", st.Link)
	}
	log = log.With("pod", rec.Pod, "container", rec.ContainerID, "ifname", rec.IfName)
	of, err := st.observe(host, link, bucketsFrom(buckets))
	if err != nil {
		return err
	}
	var lost []string
	if of.Ingress.lost != "" {
		lost = append(lost, "ingress: "+of.Ingress.lost)
	} else {
		st.Ingress = nil
	}
	if of.Egress.lost != "" {
		lost = append(lost, "egress: "+of.Egress.lost)
	} else {
		st.Egress = nil
	}
	if _, err := applyLimits(host, link, st); err != nil {
		return err
	}
	if len(lost) > 0 {
		log.Info("limits are restored from the record", "found", lost)
	}
	return nil
}

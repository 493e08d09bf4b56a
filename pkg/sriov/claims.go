// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
)

// Gone reports whether the attachment's network namespace no longer exists. It returns false if this process cannot see the folder of
// namespaces, as in a container without a mount of it.
func (h Holding) Gone() bool { return plugin.NetnsEnded(h.Netns) }

// stillPrepared returns an error unless the claim of a VF is prepared. The caller holds the VF's lock, and the VF remains usable as
// long as it does: unprepare first changes the claim record and then waits for that lock. It also reads formerMAC from the record.
func (s sriov) stillPrepared(v *vf) error {
	if v.Claim == nil {
		return nil
	}
	r, err := claim.Read(s.claims, v.Claim.UID)
	if err == nil && (r.State != claim.Prepared || !r.Has(v.Address.String())) {
		err = poddevices.ErrUnprepared
	}
	if err != nil {
		return plugin.Errorf(plugin.CodeTryAgain, "VF %s of claim %s/%s: %w", v.Address, v.Claim.Namespace, v.Claim.Name, err)
	}
	for _, b := range r.Bound {
		if b.ID == v.Address.String() {
			v.formerMAC, _ = net.ParseMAC(b.MAC)
		}
	}
	return nil
}

// noteReady adds the VF's addresses to the journal and sets Ready, once ADD has finished. The device plugin reports both in the status
// of the claim.
func (h *lockedVF) noteReady(v *vf) error {
	if v.Claim == nil {
		return nil
	}
	j, ok, err := h.load()
	if err != nil || !ok {
		return err
	}
	j.Ready, j.IPs, j.MAC, j.Userspace = true, v.Addresses, v.MAC, v.Userspace
	return h.save(j)
}

// FreeOrphan restores a VF whose attachment has ended without a DEL, before a claim uses the VF. It fails with the pod's name if a pod
// still has it, and is a no-op if the VF has no journal or that of the same claim. It needs CAP_NET_ADMIN.
func FreeOrphan(sysfs string, a pci.Address, claimUID string, log *slog.Logger) error {
	return withJournal(sysfs, a, log, func(n *nodeSide, h *lockedVF, j Holding) error {
		if j.Claim != nil && j.Claim.UID == claimUID {
			return nil
		}
		if err := n.checkNotAlive(j); err != nil {
			return err
		}
		_, err := n.restoreUnlessHeld(h, j, false)
		return err
	})
}

// checkNotAlive returns an error if the pod of a journal may be alive although its namespace is not found, because a container may not see
// it. When a namespace ends, the kernel moves the interface back to the node: if it is not there, the namespace may still exist.
func (n *nodeSide) checkNotAlive(j Holding) error {
	if !plugin.NetnsGone(j.Netns) {
		return nil // ownerHas checks this namespace
	}
	c, err := n.awaitLink(j.Address)
	switch {
	case isMissing(err):
		return nil
	case err != nil:
		return err
	case c.userspaceDriver() != "" && !plugin.NetnsVisible(j.Netns):
		folder := filepath.Dir(j.Netns)
		return plugin.WithHint(fmt.Errorf("VF %s: cannot determine whether %s is alive: folder %s is not visible", j.Address, j.ownerText(), folder),
			"mount the node's %s into the container of the daemon, with mountPropagation HostToContainer", folder)
	case c.userspaceDriver() != "":
		return nil
	case c.link.Index == 0 && j.Former.Name != "" && c.vf.Driver != "":
		return heldError(j)
	}
	return nil
}

// RestoreClaim restores the VFs of a claim's pods as DEL does: those in `recorded` and all whose journals contain the claim. It takes
// their interfaces out of namespaces that still exist, so all containers of the pods must have stopped before. It needs CAP_NET_ADMIN.
func RestoreClaim(sysfs, claimUID string, recorded []pci.Address, log *slog.Logger) error {
	all, err := Holdings()
	errs := []error{err}
	vfs := slices.Clone(recorded)
	for _, j := range all {
		if j.Claim != nil && j.Claim.UID == claimUID && !slices.Contains(vfs, j.Address) {
			vfs = append(vfs, j.Address)
		}
	}
	for _, a := range vfs {
		errs = append(errs, restoreClaimed(sysfs, a, claimUID, log))
	}
	return errors.Join(errs...)
}

func restoreClaimed(sysfs string, a pci.Address, claimUID string, log *slog.Logger) error {
	return withJournal(sysfs, a, log, func(n *nodeSide, h *lockedVF, j Holding) error {
		if j.Claim == nil || j.Claim.UID != claimUID {
			return nil
		}
		n.r.Log.Info("restoring a VF whose claim ends", "vf", a, "pod", j.Pod, "claim", j.Claim.Namespace+"/"+j.Claim.Name)
		return n.endAttachment(h, j)
	})
}

// RestoreLater writes to the journal of a VF that an ended claim could not restore its former driver, and why, beside what was not
// restored before. The daemon, Prepare or the next ADD tries again.
func RestoreLater(a pci.Address, driver string, why error) error {
	h, err := lock(a)
	if err != nil {
		return err
	}
	defer h.close()
	j, ok, err := h.load()
	if err != nil {
		return err
	}
	if !ok {
		j = Holding{Format: journalFormat, Address: a}
	}
	j.Former.Driver = driver
	switch {
	case strings.Contains(j.Unrestored, why.Error()):
		why = errors.New(j.Unrestored)
	case j.Unrestored != "":
		why = fmt.Errorf("%s; %w", j.Unrestored, why)
	}
	_, err = h.saveEnded(j, why)
	return err
}

// withJournal calls f under the lock of a VF, unless the VF has no journal.
func withJournal(sysfs string, a pci.Address, log *slog.Logger, f func(*nodeSide, *lockedVF, Holding) error) error {
	h, err := lockKnown(a)
	if h == nil {
		return err
	}
	defer h.close()
	j, ok, err := h.load()
	if err != nil || !ok {
		return err
	}
	n, err := openNode(sysfs, &plugin.Request{Plugin: "sriov", Verb: "restore", Log: log})
	if err != nil {
		return fmt.Errorf("VF %s: %w", a, err)
	}
	defer n.host.Close()
	return f(n, h, j)
}

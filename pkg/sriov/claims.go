// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
)

// JournalFolder has one file for each attached VF, named by the VF's PCI address. ADD and DEL change it.
const JournalFolder = vfsFolder

// Holding is the content of a journal about the attachment that has the VF.
type Holding struct {
	Address     pci.Address
	Network     string
	ContainerID string
	Pod         string // namespace and name
	Netns       string
	Name, MAC   string // of the interface in the pod; MAC is "" without an interface
	IPs         []netip.Prefix
	VLAN        int
	Since       time.Time
	Claim       *allocation.Claim // that assigned the VF; nil for the device plugin API
	Ready       bool              // ADD has finished; set only for a claim
}

// Gone reports whether the network namespace of the attachment is gone. It is false if the folder of the namespace is not visible, as in
// a container that does not mount the folder.
func (h Holding) Gone() bool { return plugin.NetnsGone(h.Netns) && plugin.NetnsVisible(h.Netns) }

// Holdings returns all readable journals.
func Holdings() (all []Holding, err error) {
	list, err := journals()
	for _, j := range list {
		all = append(all, Holding{Address: j.Address, Network: j.Owner.Network, ContainerID: j.Owner.ContainerID, Pod: j.Pod, Netns: j.Netns,
			Name: j.Name, MAC: j.MAC, IPs: j.IPs, VLAN: j.VLAN, Since: j.Since, Claim: j.Claim, Ready: j.Ready})
	}
	return all, err
}

// stillPrepared returns an error unless the claim of a VF is prepared. The caller holds the lock of the VF. Unprepare changes the record
// before it takes that lock, so the answer cannot be outdated.
func (s sriov) stillPrepared(v *vf) error {
	if v.Claim == nil {
		return nil
	}
	r, err := claim.Read(s.claims, v.Claim.UID)
	if err == nil && (r.State != claim.Prepared || !r.Has(v.Address.String())) {
		err = claim.ErrUnprepared
	}
	if err != nil {
		return plugin.Errorf(plugin.CodeTryAgain, "VF %s of claim %s/%s: %w", v.Address, v.Claim.Namespace, v.Claim.Name, err)
	}
	return nil
}

// noteReady records in the journal that ADD has finished, with the VF's addresses, for the status of the claim.
func (h *lockedVF) noteReady(v *vf) error {
	if v.Claim == nil {
		return nil
	}
	j, ok, err := h.load()
	if err != nil || !ok {
		return err
	}
	j.Ready, j.IPs = true, v.Addresses
	if v.MAC != "" {
		j.MAC = v.MAC
	}
	return h.save(j)
}

// FreeOrphan frees a VF for a claim: it restores the VF if its attachment has ended without a DEL. It is a no-op if the VF has no
// journal, or a journal of the same claim. An error names the pod that has the VF. FreeOrphan needs CAP_NET_ADMIN.
func FreeOrphan(sysfs string, a pci.Address, claimUID string, log *slog.Logger) error {
	return withJournal(sysfs, a, log, func(n *node, h *lockedVF, j journal) error {
		if j.Claim != nil && j.Claim.UID == claimUID {
			return nil
		}
		if err := n.checkNotAlive(j); err != nil {
			return err
		}
		return n.restoreUnlessHeld(h, j, false)
	})
}

// checkNotAlive returns an error if the pod of a journal may be alive although its namespace is not found, as in a container that does not
// see the folder of namespaces. The kernel returns an interface when its namespace ends. So a missing interface is in a live namespace.
func (n *node) checkNotAlive(j journal) error {
	if !plugin.NetnsGone(j.Netns) {
		return nil // ownerHas checks this namespace
	}
	c, err := n.awaitLink(j.Address)
	switch {
	case isMissing(err):
		return nil
	case err != nil:
		return err
	case c.userspace() != "" && !plugin.NetnsVisible(j.Netns):
		folder := filepath.Dir(j.Netns)
		return plugin.WithHint(fmt.Errorf("VF %s: cannot determine whether %s is alive: folder %s is not visible", j.Address, j.ownerText(), folder),
			"mount the node's %s into the container of the daemon, with mountPropagation HostToContainer", folder)
	case c.userspace() != "":
		return nil
	case c.link.Index == 0 && j.Former.Name != "" && c.vf.Driver != "":
		return busy(j)
	}
	return nil
}

// RestoreClaim restores the VFs that pods of a claim have, as DEL does: the VFs in the claim's record, and those whose journals name
// the claim. All containers of these pods must have stopped. RestoreClaim moves an interface out of the pod's namespace if the
// namespace still exists. It needs CAP_NET_ADMIN.
func RestoreClaim(sysfs, claimUID string, recorded []pci.Address, log *slog.Logger) error {
	all, err := journals()
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
	return withJournal(sysfs, a, log, func(n *node, h *lockedVF, j journal) error {
		if j.Claim == nil || j.Claim.UID != claimUID {
			return nil
		}
		n.r.Log.Info("restoring a VF whose claim ends", "vf", a, "pod", j.Pod, "claim", j.Claim.Namespace+"/"+j.Claim.Name)
		return n.restore(h, j)
	})
}

// withJournal calls f with the lock of a VF. It is a no-op if the VF has no journal.
func withJournal(sysfs string, a pci.Address, log *slog.Logger, f func(*node, *lockedVF, journal) error) error {
	h, err := lockKnown(a)
	if h == nil {
		return err
	}
	defer h.close()
	j, ok, err := h.load()
	if err != nil || !ok {
		return err
	}
	n, err := openNode(sysfs, &plugin.Request{Plugin: "sriov", Verb: "return", Log: log})
	if err != nil {
		return fmt.Errorf("VF %s: %w", a, err)
	}
	defer n.host.Close()
	return f(n, h, j)
}

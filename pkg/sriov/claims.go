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

// JournalFolder has one file for each VF that an attachment has, named by its PCI address. ADD and DEL change it.
const JournalFolder = vfsFolder

// Holding is what the journal of a VF says of the attachment that has the VF.
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
	Claim       *allocation.Claim // by which the pod has the VF; nil for the device plugin API
	Ready       bool              // of a claim: ADD has finished
}

// Gone reports whether the network namespace of the attachment is gone. A namespace counts as there if its folder is not visible, as in a
// container that does not mount the folder.
func (h Holding) Gone() bool { return plugin.NetnsGone(h.Netns) && plugin.NetnsVisible(h.Netns) }

// Holdings returns the readable journals of all VFs.
func Holdings() (all []Holding, err error) {
	list, err := journals()
	for _, j := range list {
		all = append(all, Holding{Address: j.Address, Network: j.Owner.Network, ContainerID: j.Owner.ContainerID, Pod: j.Pod, Netns: j.Netns,
			Name: j.Name, MAC: j.MAC, IPs: j.IPs, VLAN: j.VLAN, Since: j.Since, Claim: j.Claim, Ready: j.Ready})
	}
	return all, err
}

// stillPrepared returns an error unless the claim of a VF is prepared. The caller has the lock of the VF: Unprepare changes the record
// before it takes that lock.
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

// noteReady writes into the journal of a claim's VF that its pod has it, with which addresses: the status of the claim tells of them.
func (h *held) noteReady(v *vf) error {
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

// Settle makes a VF free for a claim: the VF comes back if its attachment has ended without a DEL. It is a no-op if the VF has no
// journal, or one of the claim. An error names the pod that has the VF. It needs CAP_NET_ADMIN.
func Settle(sysfs string, a pci.Address, claimUID string, log *slog.Logger) error {
	return withJournal(sysfs, a, log, func(n *node, h *held, j journal) error {
		if j.Claim != nil && j.Claim.UID == claimUID {
			return nil
		}
		if err := n.elsewhere(j); err != nil {
			return err
		}
		return n.settleLeft(h, j, false)
	})
}

// elsewhere returns an error if the pod of a journal may live although its namespace is not found: a daemon in a container may not see the
// folder of namespaces. The kernel returns an interface when its namespace ends, so one that stays away is in a namespace that lives.
func (n *node) elsewhere(j journal) error {
	if !plugin.NetnsGone(j.Netns) {
		return nil // has looks into it
	}
	c, err := n.await(j.Address)
	switch {
	case isGone(err):
		return nil
	case err != nil:
		return err
	case c.userspace() != "" && !plugin.NetnsVisible(j.Netns):
		folder := filepath.Dir(j.Netns)
		return plugin.WithHint(fmt.Errorf("VF %s: it is unknown whether %s lives: %s is not visible", j.Address, j.whose(), folder),
			"mount %s of the node into the container of the daemon, with mountPropagation HostToContainer", folder)
	case c.userspace() != "":
		return nil
	case c.link.Index == 0 && j.Former.Name != "" && c.vf.Driver != "":
		return busy(j)
	}
	return nil
}

// ReturnClaim brings VFs back that pods of a claim have, as DEL does: those of the claim's record, and those whose journals name the claim.
// All containers of these pods have stopped. An interface comes out of its namespace if that is still there. It needs CAP_NET_ADMIN.
func ReturnClaim(sysfs, claimUID string, recorded []pci.Address, log *slog.Logger) error {
	all, err := journals()
	errs := []error{err}
	vfs := slices.Clone(recorded)
	for _, j := range all {
		if j.Claim != nil && j.Claim.UID == claimUID && !slices.Contains(vfs, j.Address) {
			vfs = append(vfs, j.Address)
		}
	}
	for _, a := range vfs {
		errs = append(errs, returnClaimed(sysfs, a, claimUID, log))
	}
	return errors.Join(errs...)
}

func returnClaimed(sysfs string, a pci.Address, claimUID string, log *slog.Logger) error {
	return withJournal(sysfs, a, log, func(n *node, h *held, j journal) error {
		if j.Claim == nil || j.Claim.UID != claimUID {
			return nil
		}
		n.r.Log.Info("bringing a VF back whose claim ends", "vf", a, "pod", j.Pod, "claim", j.Claim.Namespace+"/"+j.Claim.Name)
		return n.restore(h, j)
	})
}

// withJournal calls f with the lock of a VF that has a journal.
func withJournal(sysfs string, a pci.Address, log *slog.Logger, f func(*node, *held, journal) error) error {
	h, err := holdKnown(a)
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

// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
)

// ResetOptions holds the parameters of a VF reset.
type ResetOptions struct {
	Sysfs    string
	Claims   string       // folder of claim records
	Address  pci.Address  // the VF
	Function func() error // resets the PCI function while no driver is bound; nil for no reset
	Act      bool         // false only prints the steps
	Out      io.Writer
	Log      *slog.Logger
}

// Reset restores the settings in the VF's journal, if any, sets the default settings on the PF and rebinds the driver. If the VF is in
// use, it returns an error with code 103.
func Reset(o ResetOptions) error {
	n, err := openNode(o.Sysfs, &plugin.Request{Plugin: "sriov", Verb: "reset", Log: o.Log})
	if err != nil {
		return err
	}
	defer n.host.Close()
	h, err := lock(o.Address)
	if err != nil {
		return err
	}
	defer h.close()
	switch r, ok, err := claim.Holder(o.Claims, "", o.Address.String()); {
	case ok:
		return plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "VF %s belongs to %s since %s", o.Address, r, r.Time.Format(time.RFC3339)),
			"the kubelet frees it after the last pod of the claim has ended")
	case err != nil:
		return plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "find the claim of VF %s: %w", o.Address, err),
			"a claim may have the VF: make the record readable, or delete it if no pod of the claim runs")
	}
	left, journaled, unreadable := h.load()
	if unreadable != nil { // the former settings are lost
		fmt.Fprintf(o.Out, "%v: remove it\n", unreadable)
	}
	if journaled {
		if has, err := n.ownerHas(left); err != nil || has {
			return errors.Join(err, heldError(left))
		}
	}
	c, err := n.readCard(o.Address)
	if err == nil {
		err = n.checkUnused(c, journaled && plugin.NetnsGone(left.Netns))
	}
	if err == nil && journaled {
		left, c, err = n.restoreFormer(h, left, c, o)
	}
	if err == nil {
		err = errors.Join(n.resetPF(c, o), n.resetVF(c, o))
	}
	if err == nil && (unreadable != nil || left.Ended) && o.Act {
		err = h.removeJournal()
	}
	return err
}

// restoreFormer restores the settings in a VF's journal. Refused limits are no error, because the default ones follow.
func (n *nodeSide) restoreFormer(h *lockedVF, left Holding, c vfCard, o ResetOptions) (Holding, vfCard, error) {
	fmt.Fprintf(o.Out, "VF %s has the settings of %s: restore its former settings\n", o.Address, left.ownerText())
	if !o.Act {
		return left, c, nil
	}
	left, err := n.restoreVF(h, left)
	if err == nil || left.limitsPending() {
		c, err = n.readCard(o.Address)
	}
	return left, c, err
}

// checkUnused returns an error if the VF is in use. A missing interface does not mean this if `left`, that is, if the VF has the
// journal of a pod whose namespace is gone.
func (n *nodeSide) checkUnused(c vfCard, left bool) error {
	if err := n.checkUsable(c, false); err != nil {
		return err
	}
	if c.link.Index == 0 && c.vf.Driver != "" && c.userspaceDriver() == "" && !left {
		return plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "VF %s: its interface is in another namespace", c.vf.Address),
			"a pod probably has it through another plugin: delete the pod that 'podlace sriov ls' names")
	}
	if c.link.Index == 0 {
		return nil
	}
	addresses, err := n.host.Addresses(c.link)
	if err == nil && c.link.Up && len(addresses) > 0 {
		err = plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "VF %s is in use on the node: %s is up with %s", c.vf.Address, c.link.Name,
			addresses), "if nothing needs it, run 'ip link set %s down' first", c.link.Name)
	}
	return err
}

// resetVF rebinds the driver of a VF. A network driver then creates a new interface.
func (n *nodeSide) resetVF(c vfCard, o ResetOptions) error {
	if c.vf.Driver != "" {
		fmt.Fprintf(o.Out, "unbind its driver %s\n", c.vf.Driver)
	}
	if o.Function != nil {
		fmt.Fprintln(o.Out, "reset the function")
	}
	if c.vf.Driver != "" {
		fmt.Fprintf(o.Out, "bind its driver %s\n", c.vf.Driver)
	}
	if !o.Act {
		return nil
	}
	ctx := context.Background()
	if err := pci.Bind(ctx, n.sysfs, o.Address, ""); err != nil {
		return err
	}
	var err error
	if o.Function != nil {
		if err = o.Function(); errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
			return err // the kernel may still be resetting the function
		}
	}
	if c.vf.Driver != "" {
		err = errors.Join(err, pci.Bind(ctx, n.sysfs, o.Address, c.vf.Driver))
	}
	if err != nil {
		return err
	}
	now, err := n.awaitBound(o.Address)
	if err == nil && now.link.Index != 0 && c.link.Index != 0 && now.link.Name != c.link.Name {
		now.link.Name, err = c.link.Name, n.host.Rename(now.link, c.link.Name)
	}
	return err
}

// resetPF sets a VF's default settings on its PF, unless the PF is in another namespace.
func (n *nodeSide) resetPF(c vfCard, o ResetOptions) error {
	have, available, err := n.settingsOnPF(c)
	if err != nil || !available {
		return err
	}
	want := kernel.VF{MAC: make(net.HardwareAddr, len(have.MAC)), Proto: "802.1q", LinkState: "auto"}
	if have.SpoofCheck != nil { // otherwise the driver does not support this setting
		want.SpoofCheck = new(true)
	}
	if have.Trust != nil {
		want.Trust = new(false)
	}
	fmt.Fprintf(o.Out, "PF %s has the settings: %s\n  set: %s\n", c.pfLink.Name, formatVF(have), formatVF(want))
	if !o.Act {
		return nil
	}
	return errors.Join(n.restoreOnPF(c, have, want, nil))
}

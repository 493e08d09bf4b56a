// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"syscall"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
)

// releaseVF restores a VF to its state before the attachment. It is a no-op if the VF belongs to another attachment or none. ok is false
// if the VF has no journal.
func (n *nodeSide) releaseVF(owner attachment.Key, a pci.Address) (ok bool, err error) {
	h, err := lockKnown(a)
	if h == nil {
		return false, err
	}
	defer h.close()
	j, ok, err := h.load()
	if err != nil || !ok {
		return false, err
	}
	if j.Owner != owner {
		n.r.Log.Info("the VF belongs to another pod now; leaving it unchanged", "vf", a, "pod", j.Pod)
		return true, nil
	}
	return true, n.endAttachment(h, j)
}

// endAttachment restores a VF whose pod ends. If the pod no longer has the VF, it can end even if a part cannot be restored now, for
// example because a driver refuses it.
func (n *nodeSide) endAttachment(h *lockedVF, j Holding) error {
	left, err := n.restoreVF(h, j)
	if err == nil || !left.Ended {
		return err
	}
	n.r.Log.Warn("the VF is not fully restored; the daemon, GC and its next pod retry", "vf", j.Address, "usable", left.limitsPending(), "error", err)
	return nil
}

// vfRestore is one restoration of a VF.
type vfRestore struct {
	*nodeSide
	j Holding
	c vfCard
}

// restoreVF restores the settings in a VF's journal, continuing after an error. It removes the journal once all of them are restored,
// or if the VF no longer exists. After an error it returns the journal, which has Ended unless the pod may still have the VF.
func (n *nodeSide) restoreVF(h *lockedVF, j Holding) (left Holding, err error) {
	x := vfRestore{nodeSide: n, j: j}
	if x.c, err = n.readCard(j.Address); isMissing(err) {
		n.r.Log.Info("the VF no longer exists; removing its journal", "vf", j.Address)
		n.removeInfo(j.Info)
		return Holding{}, h.removeJournal()
	}
	if err != nil {
		return j, err
	}
	if j.limitsPending() {
		return x.restoreLimits(h)
	}
	inPod := x.retrieveLink()
	x.restoreMAC()
	limitsErr, err := x.restorePF()
	err = errors.Join(inPod, err, x.restoreDriver(), x.rebindIfConfigured())
	if x.c.link.Index != 0 && j.Former.Name != "" {
		err = errors.Join(err, x.restoreLink())
	}
	if _, e := n.readCard(j.Address); isMissing(e) {
		limitsErr, err = nil, nil // the VF was removed meanwhile, which explains all errors
	}
	n.removeInfo(j.Info)
	if err == nil && limitsErr == nil {
		return Holding{}, h.removeJournal()
	}
	if inPod == nil || j.Ended {
		var unsaved error
		j, unsaved = h.saveEnded(j, err)
		err = errors.Join(err, unsaved)
	}
	err = errors.Join(err, limitsErr)
	return j, plugin.Errorf(plugin.Code(err), "restore VF %s: %w", j.Address, err)
}

// retrieveLink moves the interface back to the node, unless the kernel has done so because the pod's namespace has ended. In that case the
// interface keeps its name from the pod until restoreLink renames it.
func (x *vfRestore) retrieveLink() error {
	if x.c.link.Index != 0 || x.j.Former.Name == "" || x.c.vf.Driver == "" || x.c.userspaceDriver() != "" {
		return nil
	}
	pod, link, alive, err := findInPod(x.j)
	if err != nil {
		return err
	}
	if alive {
		defer pod.Close()
	}
	if link.Index != 0 {
		return x.moveToNode(pod, link)
	}
	c, err := x.awaitLink(x.j.Address)
	if err != nil {
		return err
	}
	if x.c = c; c.link.Index != 0 {
		return nil
	}
	// The pod has hidden the interface in an unnamed namespace. Unbinding the driver deletes it there.
	x.r.Log.Warn("cannot find the interface of the VF; rebinding its driver", "vf", x.j.Address, "driver", x.c.vf.Driver)
	if x.c, err = x.rebind(x.c); err == nil && x.c.link.Index == 0 {
		err = plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "its interface cannot be found"),
			"run 'podlace sriov reset %s' when no pod has the VF", x.j.Address)
	}
	return err
}

// moveToNode moves the interface from a pod to the node, without the alternative names that the pod added, which could conflict with
// names on the node.
func (x *vfRestore) moveToNode(pod *kernel.NS, link kernel.Link) error {
	home, err := x.host.File()
	if err != nil {
		return err
	}
	defer home.Close()
	if link.Up {
		if err := pod.SetDown(link); err != nil {
			return err
		}
	}
	for _, name := range link.AltNames {
		if err := pod.DelAltName(link, name); err != nil {
			return err
		}
	}
	if was := x.j.Former.Traits; was != link.Traits && was != (kernel.Traits{}) {
		// If an interface returns to the node with the flag NOARP, the kernel disables its duplicate address detection for good. An
		// error does not matter here, because the flags are restored again on the node.
		_ = pod.SetTraits(link, was)
	}
	name, err := x.withFormerName(func(name string) error { return pod.MoveLink(link, home, name) })
	if err != nil {
		return err
	}
	link, ok, err := x.host.Link(name)
	if err == nil && !ok {
		err = plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "another program renamed or deleted %s", name),
			"the next DEL, GC or ADD retries")
	}
	x.c.link = link
	return err
}

// withFormerName calls f to give the interface its former name, or one from the VF's PCI address if another interface has it.
func (x *vfRestore) withFormerName(f func(name string) error) (name string, err error) {
	name = x.j.Former.Name
	if err = x.retryReclaimed(name, func() error { return f(name) }); errors.Is(err, syscall.EEXIST) {
		if name = nameByAddress(x.j.Address); name == x.c.link.Name {
			return name, nil // it already has this name
		}
		x.r.Log.Warn("another interface has the VF's former name; using a name derived from its address", "vf", x.j.Address, "taken", x.j.Former.Name, "name",
			name)
		err = f(name)
	}
	return name, err
}

// retryReclaimed calls f to give the VF's interface a name. If the interface of another VF has it, it renames that and calls f again.
func (x *vfRestore) retryReclaimed(name string, f func() error) error {
	err := f()
	if !errors.Is(err, syscall.EEXIST) || !x.reclaimName(name) {
		return err
	}
	return f()
}

// reclaimName renames the interface of another VF that has the name. This happens if a pod gave its VF the name and the kernel then
// moved it back to the node. Its former name is restored later, from its own journal.
func (x *vfRestore) reclaimName(name string) bool {
	other, ok, err := x.host.Link(name)
	if err != nil || !ok {
		return false
	}
	all, _ := Holdings() // unreadable ones are skipped
	for _, j := range all {
		if j.Address == x.j.Address || j.Former.Name == name || slices.Contains(j.Former.AltNames, name) {
			continue
		}
		if c, err := x.readCard(j.Address); err != nil || c.link.Index != other.Index {
			continue
		}
		x.r.Log.Warn("a pod renamed its VF to a name that belongs to another VF", "name", name, "vf", j.Address, "pod", j.Pod)
		if other.Name == name {
			return x.host.Rename(other, temporaryName(j.Address)) == nil // the interface is down after its return, so it can be renamed
		}
		return x.host.DelAltName(other, name) == nil
	}
	return false
}

// nameByAddress returns a name that no other interface has, such as v00003b10.2.
func nameByAddress(a pci.Address) string { return "v" + strings.ReplaceAll(a.String(), ":", "") }

// temporaryName returns a name for an interface whose current one belongs to another VF, until its own VF is restored.
func temporaryName(a pci.Address) string { return "x" + nameByAddress(a)[1:] }

// restoreMAC sets the former MAC on the interface itself, if the driver allows it, and not on the PF, where it would prevent later
// tenants from changing the MAC.
func (x *vfRestore) restoreMAC() {
	f := x.j.Former
	if x.c.link.Index == 0 || f.PF == nil || bytes.Equal(x.c.link.MAC, f.MAC) || !bytes.Equal(f.PF.MAC, f.MAC) {
		return
	}
	if err := x.host.SetMAC(x.c.link, f.MAC); err != nil {
		x.r.Log.Info("the VF's driver refuses its former MAC; setting it on the PF", "vf", x.j.Address, "error", err)
		return
	}
	x.c.link.MAC = f.MAC
}

func (x *vfRestore) restorePF() (limitsErr, err error) {
	if x.j.Former.PF == nil {
		return nil, nil
	}
	now, err := x.presentOnPF()
	if err != nil {
		return nil, err
	}
	return x.restoreOnPF(x.c, now, *x.j.Former.PF, x.j.Former.MAC)
}

// presentOnPF returns the VF's settings on its PF, or an error if the PF does not report them.
func (x *vfRestore) presentOnPF() (kernel.VF, error) {
	now, ok, err := x.settingsOnPF(x.c)
	if err == nil && !ok {
		err = plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "its PF %s no longer reports the VF", x.c.pf.Address),
			"the PF needs its driver and its interface in the namespace of the node; then the next DEL, GC or ADD restores the VF")
	}
	return now, err
}

// restoreLimits restores the rates and the link state, and changes nothing else, because a claim may have bound another driver since. It
// returns the journal if an error remains.
func (x *vfRestore) restoreLimits(h *lockedVF) (left Holding, err error) {
	now, err := x.presentOnPF()
	if err == nil {
		want, former := now, x.j.Former.PF
		want.MinRate, want.MaxRate, want.LinkState = former.MinRate, former.MaxRate, former.LinkState
		err = x.setOnPF(x.c, now, want)
	}
	if err != nil {
		return x.j, plugin.Errorf(plugin.Code(err), "restore VF %s: %w", x.j.Address, err)
	}
	return Holding{}, h.removeJournal()
}

func (x *vfRestore) restoreDriver() (err error) {
	driver := x.j.Former.Driver
	if x.c.vf.Driver == driver {
		return nil
	}
	if err := pci.Bind(context.Background(), x.sysfs, x.j.Address, driver); err != nil {
		return plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "%w", err), "load it with 'modprobe %s'", driver)
	}
	if x.j.Former.Name == "" {
		x.c, err = x.readCard(x.j.Address)
		return err
	}
	if x.c, err = x.awaitLink(x.j.Address); err == nil && x.c.link.Index == 0 {
		err = plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "it has no interface after binding driver %s", driver),
			"'dmesg' says why; 'podlace sriov reset %s --yes' rebinds the driver", x.j.Address)
	}
	return err
}

// rebindIfConfigured rebinds the driver if the configuration asks for it, which discards all state in the driver, such as queues and
// filters.
func (x *vfRestore) rebindIfConfigured() (err error) {
	if x.j.Rebind && x.c.link.Index != 0 {
		x.c, err = x.rebind(x.c)
	}
	return err
}

// removeXDP removes the XDP programs that the pod attached. One that is attached through an XDP link stays while a process or a file in
// a BPF file system refers to the link. removeXDP then rebinds the driver, which deletes the interface and the link.
func (x *vfRestore) removeXDP() error {
	if x.c.link.XDP == 0 {
		return nil
	}
	err := x.host.DelXDP(x.c.link)
	if errors.Is(err, syscall.EBUSY) {
		x.r.Log.Info("an XDP program of the pod is attached to the interface; rebinding the driver", "vf", x.j.Address)
		x.c, err = x.rebind(x.c)
	}
	return err
}

func (x *vfRestore) restoreLink() (err error) {
	f := x.j.Former
	if f.PF == nil || !bytes.Equal(x.c.link.MAC, f.PF.MAC) { // an interface that has got the MAC of an admin on the PF cannot change it
		if x.c, err = x.setMAC(x.c, f.MAC); err != nil {
			return err
		}
	}
	if err := x.removeXDP(); err != nil {
		return err
	}
	link := x.c.link
	if link.Up && (!f.Up || link.Name != f.Name) { // before Linux 6.2 an interface that is up cannot be renamed
		if err := x.host.SetDown(link); err != nil {
			return err
		}
		link.Up = false
	}
	if link.Name != f.Name {
		if link.Name, err = x.withFormerName(func(name string) error { return x.host.Rename(link, name) }); err != nil {
			return err
		}
	}
	err = errors.Join(x.restoreSettings(link), x.restoreAltNames(link))
	if f.Up && !link.Up {
		err = errors.Join(err, x.host.SetUp(link))
	}
	return err
}

// restoreSettings restores all settings of the interface except the MAC and the names.
func (x *vfRestore) restoreSettings(link kernel.Link) error {
	f := x.j.Former
	var errs []error
	if f.MTU != 0 && link.MTU != f.MTU {
		errs = append(errs, x.host.SetMTU(link, f.MTU))
	}
	if link.Promis != f.Promisc {
		errs = append(errs, x.host.SetPromisc(link, f.Promisc))
	}
	if link.AllMulti != f.AllMulti {
		errs = append(errs, x.host.SetAllMulti(link, f.AllMulti))
	}
	if link.TxQueue != f.TxQueue {
		errs = append(errs, x.host.SetTxQueue(link, f.TxQueue))
	}
	if link.Traits != f.Traits {
		errs = append(errs, x.host.SetTraits(link, f.Traits))
	}
	if link.Traits.NoARP && !f.Traits.NoARP { // NOARP made the kernel disable duplicate address detection
		errs = append(errs, x.host.Set(kernel.Sysctl{Path: "ipv6/conf/" + link.Name + "/accept_dad", Value: "1"}))
	}
	if len(f.Features) > 0 {
		errs = append(errs, pci.SetFeatures(link.Name, f.Features))
	}
	if link.Alias != f.Alias {
		errs = append(errs, x.host.SetAlias(link, f.Alias))
	}
	return errors.Join(errs...)
}

// restoreAltNames restores the alternative names in their former order, except those that another interface has.
func (x *vfRestore) restoreAltNames(link kernel.Link) error {
	has, had := link.AltNames, x.j.Former.AltNames
	for len(has) > 0 && len(had) > 0 && has[0] == had[0] {
		has, had = has[1:], had[1:]
	}
	var errs []error
	for _, name := range has {
		errs = append(errs, x.host.DelAltName(link, name))
	}
	for _, name := range had {
		if name == link.Name {
			continue
		}
		err := x.retryReclaimed(name, func() error { return x.host.AddAltName(link, name) })
		if errors.Is(err, syscall.EEXIST) {
			x.r.Log.Warn("another interface has a former alternative name of the VF; it is not restored", "vf", x.j.Address, "name", name)
			err = nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"syscall"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
)

// dadTimeout limits IPv6 duplicate address detection: one to two seconds after the interface has a carrier (RFC 4862 section 5.4), for
// which a new interface needs some seconds.
const dadTimeout = 10 * time.Second

// attach moves a VF into the pod and configures it.
func (s sriov) attach(j *requestJob, v *vf) error {
	h, err := lock(v.Address)
	if err != nil {
		return err
	}
	defer h.close()
	if err := s.stillPrepared(v); err != nil {
		return err
	}
	left, ok, err := h.load()
	if err == nil && ok { // of an earlier attachment
		left, err = j.restoreUnlessHeld(h, left, left.Owner == j.att.Key)
	}
	if err != nil {
		return err
	}
	c, err := j.readCard(v.Address)
	if isMissing(err) {
		return plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "VF %s does not exist: %w", v.Address, err),
			"its card has fewer VFs than before, or is gone ('podlace sriov ls'); delete the pod, so that it gets another VF")
	}
	if err == nil {
		err = j.checkUsable(c, v.Claim != nil)
	}
	if err != nil {
		return err
	}
	if err := j.writeJournal(h, v, c, left.Former.PF); err != nil {
		return err
	}
	if err := j.setPF(c, v); err != nil {
		return err
	}
	if c, err = j.bindDriver(c, v.Wanted.Driver); err != nil {
		return err
	}
	if err := writeInfo(j.cfg.infoPath(j.r, *v), c.vf); err != nil {
		return err
	}
	if v.Userspace = c.userspaceDriver(); v.Userspace != "" {
		v.MAC, err = j.userspaceMAC(c, v)
		if err == nil {
			err = s.leaseAddresses(j, v)
		}
		if err != nil {
			return err
		}
		return h.noteReady(v)
	}
	link, err := j.moveToPod(c, v)
	if err != nil {
		return err
	}
	if err := s.leaseAddresses(j, v); err != nil {
		return err
	}
	if err := j.configureLink(link, v); err != nil {
		return err
	}
	return h.noteReady(v)
}

// userspaceMAC returns the MAC that a program in user space finds in the VF: the one that ADD has set or the PF's or, without a PF, the
// former interface's. It returns "" if that is unknown, because the PF then lets the program choose.
func (n *nodeSide) userspaceMAC(c vfCard, v *vf) (string, error) {
	set, _, err := n.settingsOnPF(c)
	macs := []net.HardwareAddr{v.Fixed, set.MAC}
	if !c.vf.IsVF() {
		macs = append(macs, v.formerMAC)
	}
	for _, mac := range macs {
		if !isZero(mac) {
			return mac.String(), err
		}
	}
	return "", err
}

// restoreUnlessHeld restores the VF of a journal, unless another pod still has it. It returns the journal if only the limits on the PF
// could not be restored, with which a pod may have the VF.
func (n *nodeSide) restoreUnlessHeld(h *lockedVF, left Holding, own bool) (Holding, error) {
	if !own {
		if has, err := n.ownerHas(left); err != nil || has {
			return left, errors.Join(err, heldError(left))
		}
	}
	n.r.Log.Warn("restoring an orphaned VF of an earlier attachment", "vf", h.address, "pod", left.Pod, "of", left.Owner.ContainerID)
	left, err := n.restoreVF(h, left)
	if err != nil && left.limitsPending() {
		n.r.Log.Warn("the VF keeps a rate or the link state of an earlier pod", "vf", h.address, "error", err)
		return left, nil
	}
	return left, err
}

// ownerHas reports whether the pod in a VF's journal still has the VF.
func (n *nodeSide) ownerHas(left Holding) (bool, error) {
	if left.Ended {
		return false, nil
	}
	pod, link, alive, err := findInPod(left)
	if err != nil || !alive {
		return false, err
	}
	defer pod.Close()
	if link.Index != 0 {
		return true, nil
	}
	c, err := n.readCard(left.Address)
	if isMissing(err) {
		return false, nil
	}
	return c.userspaceDriver() != "", err // a user space program uses the VF until its pod ends
}

func heldError(left Holding) error {
	hint := "its DEL frees the VF: delete that pod if it should not have it (container %s, %s in network %s)"
	if left.Claim != nil {
		hint += ". Pods that share a claim can have its VF one at a time: use a ResourceClaimTemplate to give each pod its own claim"
	}
	return plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "VF %s: %s has it since %s", left.Address, left.ownerText(),
		left.Since.Format(time.RFC3339)),
		hint, left.Owner.ContainerID, left.Owner.IfName, left.Owner.Network)
}

// writeJournal saves the journal of a VF before the first change. limits are the rates and the link state of a journal that it replaces, or
// nil.
func (j *requestJob) writeJournal(h *lockedVF, v *vf, c vfCard, limits *kernel.VF) error {
	f := formerState{Driver: c.vf.Driver}
	if now, ok, err := j.settingsOnPF(c); err != nil {
		return err
	} else if ok {
		if f.PF = &now; limits != nil {
			now.MinRate, now.MaxRate, now.LinkState = limits.MinRate, limits.MaxRate, limits.LinkState
		}
	}
	mac := c.link.MAC
	if link := c.link; link.Index != 0 {
		f.Name, f.AltNames, f.Alias, f.MAC, f.MTU = link.Name, link.AltNames, link.Alias, link.MAC, link.MTU
		f.Promisc, f.AllMulti, f.Up, f.TxQueue = link.Promis, link.AllMulti, link.Up, link.TxQueue
		f.Traits, v.formerMAC = link.Traits, link.MAC
		features, err := pci.Features(link.Name)
		if err != nil {
			return err
		}
		f.Features = features
	}
	if v.Fixed != nil {
		mac = v.Fixed
	}
	vlan := 0
	if v.Wanted.VLAN != nil {
		vlan = *v.Wanted.VLAN
	}
	v.journaled = true
	return h.save(Holding{Format: journalFormat, Address: v.Address, Owner: j.att.Key, Pod: j.r.Pod.String(), Netns: j.r.NetnsPath,
		Name: v.Name,
		MAC:  mac.String(), Info: j.cfg.infoPath(j.r, *v), Since: time.Now().Truncate(time.Second),
		Rebind:         v.Wanted.Rebind != nil && *v.Wanted.Rebind,
		DeviceReported: c.link.Device != "", Chained: j.st.Chained, Claim: v.Claim, VLAN: vlan, Former: f})
}

// setPF sets the settings of the configuration, the claim and the pod on the PF. This comes before bindDriver, because some drivers
// read the VF's MAC only when they are bound.
func (j *requestJob) setPF(c vfCard, v *vf) error {
	mac := v.Fixed
	have, ok, err := j.settingsOnPF(c)
	if err != nil {
		return err
	}
	if !ok {
		wanted := v.Wanted
		wanted.MAC = mac.String()
		key := wanted.NeedsPF(pci.IsUserspace(cmp.Or(wanted.Driver, c.vf.Driver)))
		if key == "" {
			return nil
		}
		return j.withoutPF(c, v.settingText(key, j.cfg.Egress))
	}
	if mac != nil && bytes.Equal(mac, c.pfLink.MAC) {
		return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "mac %s: it is the MAC of the PF of VF %s", mac, c.vf.Address),
			"give the VF another MAC")
	}
	want := onPF(v.Wanted, have)
	if mac != nil {
		want.MAC = mac
	}
	if err = j.setOnPF(c, have, want); err != nil && !v.config.IsZero() {
		err = fmt.Errorf("VF %s with the settings of %s (%s): %w", v.Address, v.claimName(), v.config, err)
	}
	return err
}

// withoutPF returns the error for a setting that only the PF of a VF can set.
func (n *nodeSide) withoutPF(c vfCard, setting string) error {
	why := fmt.Sprintf("function %s has no PF on this node, which alone can set it", c.vf.Address)
	hint := "remove the setting, and set it on the hypervisor"
	if c.vf.IsVF() {
		why = fmt.Sprintf("the PF of VF %s is not available", c.vf.Address)
		hint = fmt.Sprintf("the PF %s has no interface in the namespace of the node, or its driver does not report VFs", c.vf.PF)
	} else if d, err := pci.Inspect(n.sysfs, c.vf.Address); err == nil && d.IsPF() {
		why, hint = fmt.Sprintf("function %s is a PF, and only VFs have this setting", c.vf.Address), "remove the setting, or give the pod a VF"
	}
	return plugin.WithHint(plugin.Errorf(plugin.CodeKernelFeature, "cannot set %s: %s", setting, why), "%s", hint)
}

// bindDriver binds the VF to a driver. With "", it keeps the one that it has.
func (j *requestJob) bindDriver(c vfCard, driver string) (bound vfCard, err error) {
	if driver != "" && driver != c.vf.Driver {
		if err := pci.Bind(context.Background(), j.sysfs, c.vf.Address, driver); err != nil {
			return c, plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "bind the driver: %w", err),
				"load it with 'modprobe %s'; 'dmesg' says why a loaded driver refuses a VF", driver)
		}
		if c, err = j.awaitBound(c.vf.Address); err != nil {
			return c, err
		}
	}
	if c.link.Index == 0 && c.userspaceDriver() == "" {
		return c, plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "VF %s with driver %q has no interface on the node", c.vf.Address,
			c.vf.Driver), "its driver is not loaded, or a program moved the interface: 'podlace sriov reset %s' says what it would do", c.vf.Address)
	}
	return c, nil
}

// moveToPod sets the interface's MAC and MTU, moves it into the pod and renames it. It removes the alternative names, which are meant
// for the node and could conflict with names in the pod.
func (j *requestJob) moveToPod(c vfCard, v *vf) (link kernel.Link, err error) {
	if c.link.Up {
		if err := j.host.SetDown(c.link); err != nil {
			return link, err
		}
	}
	if v.Fixed != nil {
		if c, err = j.setMAC(c, v.Fixed); err != nil {
			return link, err
		}
	}
	for _, name := range c.link.AltNames {
		if err := j.host.DelAltName(c.link, name); err != nil {
			return link, err
		}
	}
	if mtu := v.Wanted.MTU; mtu != nil && *mtu != c.link.MTU {
		if err := j.host.SetMTU(c.link, *mtu); errors.Is(err, syscall.EINVAL) {
			return link, plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "mtu %d: %w", *mtu, err),
				"the MTU of a VF must not exceed the MTU of its PF")
		} else if err != nil {
			return link, err
		}
	}
	err = j.host.MoveLink(c.link, j.r.Netns, v.Name)
	if errors.Is(err, syscall.EEXIST) {
		err = plugin.Errorf(plugin.CodeAddressTaken, "interface %s already exists in the pod: %w", v.Name, err)
	}
	if err != nil {
		return link, err
	}
	link, ok, err := j.pod.Link(v.Name)
	if err == nil && !ok {
		err = plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "VF %s: a program in the pod renamed or deleted interface %s", v.Address, v.Name),
			"the runtime retries; if it repeats, look for a container with NET_ADMIN that starts before the network is ready")
	}
	v.MAC, v.MTU = link.MAC.String(), link.MTU
	return link, err
}

// configureLink gives the interface its addresses and routes, and sets it up. Duplicate address detection is on, because other hosts on
// the network may have the address.
func (j *requestJob) configureLink(link kernel.Link, v *vf) error {
	conf := "ipv6/conf/" + v.Name + "/"
	settings := []kernel.Sysctl{{Path: conf + "ndisc_notify", Value: "1"}}
	has6 := v.ips != nil && v.ips.Has6()
	if has6 {
		settings = append(settings, kernel.Sysctl{Path: conf + "disable_ipv6", Value: "0"},
			kernel.Sysctl{Path: conf + "keep_addr_on_down", Value: "1"})
	}
	if err := j.pod.Set(settings...); err != nil {
		return err
	}
	if err := j.pod.SetARPNotify(link); err != nil {
		return err
	}
	for _, a := range v.Addresses {
		if err := j.pod.AddAddress(link, a, true); err != nil {
			return err
		}
	}
	if err := j.pod.SetUp(link); err != nil {
		return err
	}
	if j.st.Chained {
		if err := j.keepDefault(v); err != nil {
			return err
		}
	}
	for _, route := range v.Routes {
		if err := j.pod.AddRoute(link, route); err != nil {
			return err
		}
	}
	if has6 {
		v.dadLink = link
	}
	return nil
}

// keepDefault drops the default routes that ADD is about to create for a VF if an earlier plugin of the chain has created one, because
// the kernel would prefer the newer one.
func (j *requestJob) keepDefault(v *vf) (err error) {
	v.Routes = slices.DeleteFunc(v.Routes, func(route kernel.Route) bool {
		if route.Dst.Bits() != 0 || route.Priority != 0 || route.Table != nil || err != nil {
			return false
		}
		var has bool
		if has, err = j.pod.HasDefault(route.Dst.Addr().Is4()); has {
			j.r.Log.Warn("the pod already has a default route; the VF's default route is not added", "ifname", v.Name, "via", route.Gateway)
		}
		return has
	})
	return err
}

// awaitDAD waits until the IPv6 addresses of all VFs are usable. Their duplicate address detection runs in parallel and takes one or
// two seconds.
func (j *requestJob) awaitDAD() error {
	until := time.Now().Add(dadTimeout)
	for _, v := range j.st.VFs {
		if v.dadLink.Index == 0 {
			continue
		}
		err := j.pod.WaitForDAD(v.dadLink, time.Until(until))
		if err == nil {
			continue
		}
		now, ok, readErr := j.pod.LinkByIndex(v.dadLink.Index)
		if readErr != nil || !ok || now.Runs {
			return plugin.Errorf(plugin.CodeAddressTaken, "%w", errors.Join(err, readErr))
		}
		j.r.Log.Warn("the interface has no carrier: its IPv6 addresses are not usable yet", "ifname", v.Name)
	}
	return nil
}

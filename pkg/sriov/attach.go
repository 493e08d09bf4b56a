// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
)

// dadTimeout bounds duplicate address detection. It takes one to two seconds (RFC 4862 section 5.4) from the time of carrier, and an
// interface that has just come up needs some seconds to get a carrier.
const dadTimeout = 10 * time.Second

// attach moves a VF into the pod and configures it.
func (s sriov) attach(j *job, v *vf) error {
	h, err := lock(v.Address)
	if err != nil {
		return err
	}
	defer h.close()
	if err := s.stillPrepared(v); err != nil {
		return err
	}
	if err := j.restoreResidue(h); err != nil {
		return err
	}
	c, err := j.read(v.Address)
	if isMissing(err) {
		return plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "VF %s does not exist: %w", v.Address, err),
			"check whether the VFs of the card were removed or recreated")
	}
	if err == nil {
		err = j.checkUsable(c, v.Claim != nil)
	}
	if err != nil {
		return err
	}
	if err := j.record(h, v, c); err != nil {
		return err
	}
	if err := j.setPF(c, v); err != nil {
		return err
	}
	if c, err = j.bind(c, v.wanted.Driver); err != nil {
		return err
	}
	if err := writeInfo(j.cfg.infoPath(j.r, *v), c.vf); err != nil {
		return err
	}
	if v.Userspace = c.userspace(); v.Userspace != "" {
		v.MAC = v.Fixed.String()
		if err := s.lease(j, v); err != nil {
			return err
		}
		return h.noteReady(v)
	}
	link, err := j.move(c, v)
	if err != nil {
		return err
	}
	if err := s.lease(j, v); err != nil {
		return err
	}
	if err := j.configure(link, v); err != nil {
		return err
	}
	return h.noteReady(v)
}

// restoreResidue checks the journal of a VF before it is attached. It restores a VF that an earlier attachment left behind, and refuses
// one that another pod has.
func (j *job) restoreResidue(h *lockedVF) error {
	left, ok, err := h.load()
	if err != nil || !ok {
		return err
	}
	return j.restoreUnlessHeld(h, left, left.Owner == j.att.Key)
}

// restoreUnlessHeld restores the VF of a journal, unless another pod has it.
func (n *node) restoreUnlessHeld(h *lockedVF, left journal, own bool) error {
	if !own {
		if has, err := n.ownerHas(left); err != nil || has {
			return errors.Join(err, busy(left))
		}
	}
	n.r.Log.Warn("restoring an orphaned VF of an earlier attachment", "vf", h.address, "pod", left.Pod, "of", left.Owner.ContainerID)
	return n.restore(h, left)
}

// ownerHas reports whether the owner of a journal has the VF.
func (n *node) ownerHas(left journal) (bool, error) {
	pod, link, alive, err := findInPod(left)
	if err != nil || !alive {
		return false, err
	}
	defer pod.Close()
	if link.Index != 0 {
		return true, nil
	}
	c, err := n.read(left.Address)
	if isMissing(err) {
		return false, nil
	}
	return c.userspace() != "", err // a user space program has it as long as its pod lives
}

func busy(left journal) error {
	hint := "the owner is container %s, %s in network %s, whose DEL frees the VF"
	if left.Claim != nil {
		hint += ". Pods that share a claim can have its VF one at a time: use a ResourceClaimTemplate to give each pod its own claim"
	}
	return plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "VF %s: %s has it since %s", left.Address, left.ownerText(),
		left.Since.Format(time.RFC3339)),
		hint, left.Owner.ContainerID, left.Owner.IfName, left.Owner.Network)
}

// checkUsable returns an error for a PCI function that no pod may have. A claim may have a PF without VFs.
func (n *node) checkUsable(c card, byClaim bool) error {
	refuse := func(format string, args ...any) error {
		return plugin.Errorf(plugin.CodeDevice, "PCI function %s "+format, append([]any{c.vf.Address}, args...)...)
	}
	switch {
	case !c.vf.IsVF() && (!byClaim || !n.isPFWithoutVFs(c.vf.Address)):
		return plugin.WithHint(refuse("is not a VF of this node"), "a PF, and a card without VFs, are not given to pods")
	case c.vf.LinkType == pci.InfiniBand:
		return refuse("is an InfiniBand VF: setting its GUIDs is not supported")
	case c.link.Index != 0 && plugin.ValidIfName(c.link.Name) != nil:
		return refuse("has an interface whose name could not be restored: %q", c.link.Name)
	case c.link.Master != 0:
		return refuse("is in use on the node: %s is a port of another interface", c.link.Name)
	case n.upperLink(c) != "":
		return refuse("is in use on the node: %s is the lower interface of %s", c.link.Name, n.upperLink(c))
	case c.link.Up && n.host.IsUplink(c.link):
		return refuse("is in use on the node: %s carries the default route", c.link.Name)
	}
	return nil
}

// isPFWithoutVFs reports whether a function is a PF that supports VFs and has none.
func (n *node) isPFWithoutVFs(pf pci.Address) bool {
	d, err := pci.Inspect(n.sysfs, pf)
	return err == nil && d.TotalVFs > 0 && d.NumVFs == 0
}

// upperLink returns an interface on top of the VF's interface, such as a macvlan, or "".
func (n *node) upperLink(c card) string {
	if c.link.Index == 0 {
		return ""
	}
	found, _ := filepath.Glob(filepath.Join(n.sysfs, "bus/pci/devices", c.vf.Address.String(), "net", c.link.Name, "upper_*"))
	if len(found) == 0 {
		return ""
	}
	return strings.TrimPrefix(filepath.Base(found[0]), "upper_")
}

// record writes the journal before the first change.
func (j *job) record(h *lockedVF, v *vf, c card) error {
	f := former{Driver: c.vf.Driver}
	if now, ok, err := j.settingsOnPF(c); err != nil {
		return err
	} else if ok {
		f.PF = &now
	}
	mac := c.link.MAC
	if link := c.link; link.Index != 0 {
		f.Name, f.AltNames, f.Alias, f.MAC, f.MTU = link.Name, link.AltNames, link.Alias, link.MAC, link.MTU
		f.Promisc, f.AllMulti, f.Up, f.TxQueue = link.Promis, link.AllMulti, link.Up, link.TxQueue
		f.Traits = link.Traits
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
	if v.wanted.VLAN != nil {
		vlan = *v.wanted.VLAN
	}
	v.journaled = true
	return h.save(journal{Format: journalFormat, Address: v.Address, Owner: j.att.Key, Pod: j.r.Pod.String(), Netns: j.r.NetnsPath,
		Name: v.Name,
		MAC:  mac.String(), Info: j.cfg.infoPath(j.r, *v), Since: time.Now().Truncate(time.Second), Rebind: v.wanted.Rebind,
		DeviceReported: c.link.Device != "", Chained: j.st.Chained, Claim: v.Claim, VLAN: vlan, Former: f})
}

// setPF sets the VF's settings on its PF. It runs before a driver is bound, because some drivers read the VF's MAC only then.
func (j *job) setPF(c card, v *vf) error {
	mac := v.Fixed
	have, ok, err := j.settingsOnPF(c)
	if err != nil {
		return err
	}
	if !ok {
		key, needed := v.wanted.needsPF()
		if !needed && mac != nil && c.link.Index == 0 {
			key, needed = "mac", true
		}
		if needed {
			return plugin.WithHint(plugin.Errorf(plugin.CodeKernelFeature, "cannot set %s: the PF of VF %s is not available", key, c.vf.Address),
				"the PF %s has no interface in the namespace of the node, or its driver does not report VFs", c.vf.PF)
		}
		return nil
	}
	if mac != nil && bytes.Equal(mac, c.pfLink.MAC) {
		return plugin.Errorf(plugin.CodeConfig, "mac %s: it is the MAC of the PF of VF %s", mac, c.vf.Address)
	}
	want := v.wanted.apply(have)
	if mac != nil {
		want.MAC = mac
	}
	return j.setOnPF(c, have, want)
}

// setOnPF sets the settings of a VF on its PF.
func (n *node) setOnPF(c card, have, want kernel.VF) error {
	err := n.host.SetVF(c.pfLink, c.vf.VFIndex, have, want)
	if err == nil {
		return nil
	}
	code := plugin.Code(err)
	if errors.Is(err, syscall.EINVAL) {
		code = plugin.CodeDevice
	}
	return plugin.WithHint(plugin.Errorf(code, "%w", err), "the PF's driver %s refuses a setting; it may not support the setting or its value: "+
		"a rate must not exceed the speed of the link, and the link must be up", c.pf.Driver)
}

// bind binds the VF to a driver. "" keeps its driver.
func (j *job) bind(c card, driver string) (card, error) {
	if driver != "" && driver != c.vf.Driver {
		if err := pci.Bind(context.Background(), j.sysfs, c.vf.Address, driver); err != nil {
			return c, plugin.Errorf(plugin.CodeDevice, "bind the driver: %w", err)
		}
		var err error
		if c, err = j.awaitBound(c.vf.Address); err != nil {
			return c, err
		}
	}
	if c.link.Index == 0 && c.userspace() == "" {
		return c, plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "VF %s with driver %q has no interface on the node", c.vf.Address,
			c.vf.Driver),
			"another program may have moved it, or its driver is not loaded")
	}
	return c, nil
}

// move sets the MAC and MTU of the interface, and moves it into the pod under its name there. It first removes the interface's
// alternative names, which belong to the node and may be taken in the pod.
func (j *job) move(c card, v *vf) (link kernel.Link, err error) {
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
	if mtu := v.wanted.MTU; mtu != 0 && mtu != c.link.MTU {
		if err := j.host.SetMTU(c.link, mtu); errors.Is(err, syscall.EINVAL) {
			return link, plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "mtu %d: %w", mtu, err),
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
		err = plugin.Errorf(plugin.CodeDevice, "a program in the pod renamed or deleted interface %s", v.Name)
	}
	v.MAC, v.MTU = link.MAC.String(), link.MTU
	return link, err
}

// configure brings the interface up with its addresses and routes. It enables duplicate address detection, because the pod shares the
// network with other hosts.
func (j *job) configure(link kernel.Link, v *vf) error {
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

// keepDefault drops the default routes of a VF if the pod already has one. Earlier plugins of the chain made that route, and the kernel
// would prefer the newer one.
func (j *job) keepDefault(v *vf) (err error) {
	v.Routes = slices.DeleteFunc(v.Routes, func(route kernel.Route) bool {
		if route.Dst.Bits() != 0 || route.Priority != 0 || route.Table != nil || err != nil {
			return false
		}
		var has bool
		if has, err = j.pod.HasDefault(route.Dst.Addr().Is6()); has {
			j.r.Log.Warn("the pod already has a default route; the VF's default route is not added", "ifname", v.Name, "via", route.Gateway)
		}
		return has
	})
	return err
}

// awaitDAD waits until the IPv6 addresses of all VFs are usable. They run duplicate address detection concurrently, for a second or two.
func (j *job) awaitDAD() error {
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

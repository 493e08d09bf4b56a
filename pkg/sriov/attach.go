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

// dadTimeout bounds duplicate address detection, which takes one to two seconds (RFC 4862 section 5.4) once there is a carrier. That takes
// some seconds when an interface has just come up.
const dadTimeout = 10 * time.Second

// attach gives a VF to the pod.
func (s sriov) attach(j *job, v *vf) error {
	h, err := hold(v.Address)
	if err != nil {
		return err
	}
	defer h.close()
	if err := s.stillPrepared(v); err != nil {
		return err
	}
	if err := j.settle(h); err != nil {
		return err
	}
	c, err := j.read(v.Address)
	if isGone(err) {
		return plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "VF %s is gone: %w", v.Address, err),
			"were the VFs of the card removed or made again?")
	}
	if err == nil {
		err = j.usable(c, v.Claim != nil)
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
	if err := tell(j.cfg.infoPath(j.r, *v), c.vf); err != nil {
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

// settle looks at the journal of a VF that is to be attached: another pod may have the VF, or have left it as it was.
func (j *job) settle(h *held) error {
	left, ok, err := h.load()
	if err != nil || !ok {
		return err
	}
	return j.settleLeft(h, left, left.Owner == j.att.Key)
}

// settleLeft brings the VF of a journal back, unless a pod that is not our own has it.
func (n *node) settleLeft(h *held, left journal, own bool) error {
	if !own {
		if has, err := n.has(left); err != nil || has {
			return errors.Join(err, busy(left))
		}
	}
	n.r.Log.Warn("bringing a VF back that an attachment left", "vf", h.address, "pod", left.Pod, "of", left.Owner.ContainerID)
	return n.restore(h, left)
}

// has reports whether the owner of a journal has the VF.
func (n *node) has(left journal) (bool, error) {
	pod, link, alive, err := inPod(left)
	if err != nil || !alive {
		return false, err
	}
	defer pod.Close()
	if link.Index != 0 {
		return true, nil
	}
	c, err := n.read(left.Address)
	if isGone(err) {
		return false, nil
	}
	return c.userspace() != "", err // a program has it as long as its pod lives
}

func busy(left journal) error {
	hint := "it is container %s, %s in network %s; when that is gone, DEL gives the VF back"
	if left.Claim != nil {
		hint += ". Pods that share a claim have its VF one after the other: a ResourceClaimTemplate gives each pod its own"
	}
	return plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "VF %s: %s has it since %s", left.Address, left.whose(),
		left.Since.Format(time.RFC3339)),
		hint, left.Owner.ContainerID, left.Owner.IfName, left.Owner.Network)
}

// usable refuses what no pod may have. A claim may have a PF without VFs.
func (n *node) usable(c card, byClaim bool) error {
	refuse := func(format string, args ...any) error {
		return plugin.Errorf(plugin.CodeDevice, "PCI function %s "+format, append([]any{c.vf.Address}, args...)...)
	}
	switch {
	case !c.vf.IsVF() && (!byClaim || !n.isWhole(c.vf.Address)):
		return plugin.WithHint(refuse("is no VF of this node"), "a PF, and a card without VFs, stay with the node")
	case c.vf.LinkType == pci.InfiniBand:
		return refuse("is of InfiniBand: its GUIDs cannot be set yet")
	case c.link.Index != 0 && plugin.ValidIfName(c.link.Name) != nil:
		return refuse("has an interface with a name that cannot be given back: %q", c.link.Name)
	case c.link.Master != 0:
		return refuse("is in use on the node: %s is the port of another interface", c.link.Name)
	case n.upper(c) != "":
		return refuse("is in use on the node: %s is beneath %s", c.link.Name, n.upper(c))
	case c.link.Up && n.host.IsUplink(c.link):
		return refuse("is in use on the node: %s has its default route", c.link.Name)
	}
	return nil
}

// isWhole reports whether a PF that can have VFs has none.
func (n *node) isWhole(pf pci.Address) bool {
	d, err := pci.Inspect(n.sysfs, pf)
	return err == nil && d.TotalVFs > 0 && d.NumVFs == 0
}

// upper returns an interface that was made on top of that of a VF, such as a macvlan, or "".
func (n *node) upper(c card) string {
	if c.link.Index == 0 {
		return ""
	}
	found, _ := filepath.Glob(filepath.Join(n.sysfs, "bus/pci/devices", c.vf.Address.String(), "net", c.link.Name, "upper_*"))
	if len(found) == 0 {
		return ""
	}
	return strings.TrimPrefix(filepath.Base(found[0]), "upper_")
}

// record writes the journal, before the first change.
func (j *job) record(h *held, v *vf, c card) error {
	f := former{Driver: c.vf.Driver}
	if now, ok, err := j.asPF(c); err != nil {
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
	v.held = true
	return h.save(journal{Format: journalFormat, Address: v.Address, Owner: j.att.Key, Pod: j.r.Pod.String(), Netns: j.r.NetnsPath,
		Name: v.Name,
		MAC:  mac.String(), Info: j.cfg.infoPath(j.r, *v), Since: time.Now().Truncate(time.Second), Rebind: v.wanted.Rebind,
		Told: c.link.Device != "", Chained: j.st.Chained, Claim: v.Claim, VLAN: vlan, Former: f})
}

// setPF sets the PF for the VF. It comes before a driver is bound: some learn then which MAC the VF has.
func (j *job) setPF(c card, v *vf) error {
	mac := v.Fixed
	have, ok, err := j.asPF(c)
	if err != nil {
		return err
	}
	if !ok {
		key, needed := v.wanted.any()
		if !needed && mac != nil && c.link.Index == 0 {
			key, needed = "mac", true
		}
		if needed {
			return plugin.WithHint(plugin.Errorf(plugin.CodeKernelFeature, "%s: the PF of VF %s cannot be told", key, c.vf.Address),
				"the PF %s has no interface in the namespace of the node, or its driver does not tell of VFs", c.vf.PF)
		}
		return nil
	}
	if mac != nil && bytes.Equal(mac, c.pfLink.MAC) {
		return plugin.Errorf(plugin.CodeConfig, "mac %s: the PF of VF %s has it", mac, c.vf.Address)
	}
	want := v.wanted.apply(have)
	if mac != nil {
		want.MAC = mac
	}
	return j.set(c, have, want)
}

// set tells the PF how the VF shall be.
func (n *node) set(c card, have, want kernel.VF) error {
	err := n.host.SetVF(c.pfLink, c.vf.VFIndex, have, want)
	if err == nil {
		return nil
	}
	code := plugin.Code(err)
	if errors.Is(err, syscall.EINVAL) {
		code = plugin.CodeDevice
	}
	return plugin.WithHint(plugin.Errorf(code, "%w", err), "the driver of the PF, %s, refuses a setting; it may know none such, "+
		"or no such value: a rate is at most the speed of the link, which must be up", c.pf.Driver)
}

// bind gives the VF the driver that is configured, "" for the one that it has.
func (j *job) bind(c card, driver string) (card, error) {
	if driver != "" && driver != c.vf.Driver {
		if err := pci.Bind(context.Background(), j.sysfs, c.vf.Address, driver); err != nil {
			return c, plugin.Errorf(plugin.CodeDevice, "driver: %w", err)
		}
		var err error
		if c, err = j.bound(c.vf.Address); err != nil {
			return c, err
		}
	}
	if c.link.Index == 0 && c.userspace() == "" {
		return c, plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "VF %s has no interface on the node, with driver %q", c.vf.Address,
			c.vf.Driver),
			"another program may have moved it, or its driver is not loaded")
	}
	return c, nil
}

// move gives the interface its MAC and MTU, and moves it into the pod under its name there. It has no other names then: one of them may be
// taken in the pod, and they are the node's.
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
			return link, plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "mtu %d: %w", mtu, err), "a VF has at most the MTU of its PF")
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
		err = plugin.Errorf(plugin.CodeDevice, "interface %s was renamed or deleted by somebody in the pod", v.Name)
	}
	v.MAC, v.MTU = link.MAC.String(), link.MTU
	return link, err
}

// configure brings the interface up with its addresses and routes. Duplicate address detection is on: the network is one that others use,
// too.
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
		v.detecting = link
	}
	return nil
}

// keepDefault leaves out default routes of a VF where the pod has one: the plugins before made that, and the kernel would take the newer
// one.
func (j *job) keepDefault(v *vf) (err error) {
	v.Routes = slices.DeleteFunc(v.Routes, func(route kernel.Route) bool {
		if route.Dst.Bits() != 0 || route.Priority != 0 || route.Table != nil || err != nil {
			return false
		}
		var has bool
		if has, err = j.pod.HasDefault(route.Dst.Addr().Is6()); has {
			j.r.Log.Warn("the pod has a default route: that of the VF is left out", "ifname", v.Name, "via", route.Gateway)
		}
		return has
	})
	return err
}

// awaitDAD waits until the IPv6 addresses of all VFs can be used, which takes them a second or two together.
func (j *job) awaitDAD() error {
	until := time.Now().Add(dadTimeout)
	for _, v := range j.st.VFs {
		if v.detecting.Index == 0 {
			continue
		}
		err := j.pod.WaitForDAD(v.detecting, time.Until(until))
		if err == nil {
			continue
		}
		now, ok, readErr := j.pod.LinkByIndex(v.detecting.Index)
		if readErr != nil || !ok || now.Runs {
			return plugin.Errorf(plugin.CodeAddressTaken, "%w", errors.Join(err, readErr))
		}
		j.r.Log.Warn("the interface has no carrier: its addresses of IPv6 cannot be used yet", "ifname", v.Name)
	}
	return nil
}

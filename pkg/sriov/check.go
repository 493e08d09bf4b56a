// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"cmp"
	"errors"
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func differs(format string, args ...any) error {
	return plugin.Errorf(plugin.CodeStateDiffers, format, args...)
}

// check compares the VFs with what ADD recorded and told. Addresses and routes that the pod added itself do not matter.
func (s sriov) check(r *plugin.Request) error {
	cfg, err := parseConfig(r)
	if err != nil {
		return err
	}
	if !attachment.Recorded(r) {
		if !mayHaveVFs(r) {
			return nil
		}
		if left, err := journalsOf(attachment.KeyOf(r)); err != nil || len(left) > 0 || !chained(r) {
			return errors.Join(err, differs("the record of the pod's VFs is missing"))
		}
		return nil // a pod without VFs
	}
	j, err := s.open(r, cfg)
	if err != nil {
		return err
	}
	defer j.close()
	if ok, err := j.att.Load(&j.st); err != nil || !ok {
		return errors.Join(err, differs("the record of the VFs cannot be read"))
	}
	for _, v := range j.st.VFs {
		if err := s.checkVF(j, v); err != nil {
			return err
		}
	}
	return nil
}

func (s sriov) checkVF(j *job, v vf) error {
	if err := j.checkOwner(v); err != nil {
		return err
	}
	c, err := j.read(v.Address)
	if isGone(err) {
		return differs("VF %s of interface %s is gone", v.Address, v.Name)
	}
	if err == nil {
		err = j.checkPF(c, v)
	}
	if err != nil {
		return err
	}
	if v.Leased {
		if err := s.checkLease(j, v); err != nil {
			return err
		}
	}
	if v.Userspace != "" {
		if c.vf.Driver != v.Userspace {
			return differs("VF %s has driver %q, want %s", v.Address, c.vf.Driver, v.Userspace)
		}
		return nil
	}
	return j.checkLink(v)
}

// checkOwner wants the journal, without which DEL could not bring the VF back.
func (j *job) checkOwner(v vf) error {
	var left journal
	ok := false
	h, err := holdKnown(v.Address)
	if h != nil {
		defer h.close()
		left, ok, err = h.load()
	}
	switch {
	case err != nil:
		return err
	case !ok:
		return differs("the journal of VF %s is missing", v.Address)
	case left.Owner != j.att.Key:
		return differs("VF %s is that of pod %s", v.Address, left.Pod)
	}
	return nil
}

func (j *job) checkPF(c card, v vf) error {
	now, ok, err := j.asPF(c)
	if err != nil || !ok {
		return err
	}
	want := cmp.Or(v.Wanted, &j.st.Wanted).apply(now)
	if v.Fixed != nil {
		want.MAC = v.Fixed
	}
	if !same(now, want) {
		return differs("PF %s is set for %s: %s; want %s", c.pfLink.Name, v.Name, text(now), text(want))
	}
	return nil
}

func (j *job) checkLink(v vf) error {
	link, ok, err := j.pod.Link(v.Name)
	switch {
	case err != nil:
		return err
	case !ok:
		return differs("interface %s of VF %s is missing in the pod", v.Name, v.Address)
	case link.Device != "" && link.Device != v.Address.String():
		return differs("interface %s is that of %s, want VF %s", v.Name, link.Device, v.Address)
	case !link.Up:
		return differs("interface %s is down", v.Name)
	}
	if err := j.checkTold(link, v); err != nil {
		return err
	}
	has, err := j.pod.Addresses(link)
	if err != nil {
		return err
	}
	for _, a := range v.Addresses {
		if !slices.Contains(has, a) {
			return differs("address %s is missing on %s", a, v.Name)
		}
	}
	for _, route := range v.Routes {
		if ok, err := j.pod.HasRoute(link, route); err != nil {
			return err
		} else if !ok {
			return differs("route to %s through %s is missing", route.Dst, v.Name)
		}
	}
	return nil
}

// checkTold compares the interface with what prevResult tells of it, which a later plugin may have changed, else with what ADD made.
func (j *job) checkTold(link kernel.Link, v vf) error {
	i := slices.IndexFunc(j.r.Prev.Interfaces, func(i *types100.Interface) bool { return i.Name == v.Name && i.Sandbox != "" })
	if i < 0 {
		return differs("prevResult has no interface %s", v.Name)
	}
	mac, mtu := cmp.Or(j.r.Prev.Interfaces[i].Mac, v.MAC), cmp.Or(j.r.Prev.Interfaces[i].Mtu, v.MTU)
	switch {
	case mac != link.MAC.String():
		return differs("interface %s has MAC %s, want %s", v.Name, link.MAC, mac)
	case link.MTU > mtu || link.MTU < mtu && mtu != v.MTU: // a lower one may be a later plugin's, which do not tell it in the result
		return differs("interface %s has mtu %d, want %d", v.Name, link.MTU, mtu)
	}
	return nil
}

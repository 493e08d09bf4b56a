// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// CHECK compares the VFs of an attachment with the record and the result of ADD, and ignores addresses and routes of the pod's own.
func (s sriov) check(r *plugin.Request) error {
	cfg, err := parseConfig(r)
	if err != nil {
		return err
	}
	if !attachment.Recorded(r) {
		if !mayHaveVFs(r) {
			return nil
		}
		if left, err := journalsOf(attachment.KeyOf(r)); err != nil || len(left) > 0 || !isChained(r) {
			return errors.Join(err, plugin.Differs("the record of the pod's VFs is missing"))
		}
		return nil // the pod has no VFs
	}
	j, err := s.open(r, cfg)
	if err != nil {
		return err
	}
	defer j.close()
	if ok, err := j.att.Load(&j.st); err != nil || !ok {
		return errors.Join(err, plugin.Differs("the record of the VFs is unreadable"))
	}
	for _, v := range j.st.VFs {
		if err := s.checkVF(j, v); err != nil {
			return err
		}
	}
	return nil
}

func (s sriov) checkVF(j *requestJob, v vf) error {
	if err := j.checkOwner(v); err != nil {
		return err
	}
	c, err := j.readCard(v.Address)
	if isMissing(err) {
		return plugin.Differs("VF %s of interface %s does not exist", v.Address, v.Name)
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
			return plugin.Differs("VF %s has driver %q, want %s", v.Address, c.vf.Driver, v.Userspace)
		}
		return nil
	}
	return j.checkLink(v)
}

// checkOwner returns an error if the VF has no journal, without which DEL cannot restore it.
func (j *requestJob) checkOwner(v vf) error {
	var left Holding
	ok := false
	h, err := lockKnown(v.Address)
	if h != nil {
		defer h.close()
		left, ok, err = h.load()
	}
	switch {
	case err != nil:
		return err
	case !ok:
		return plugin.Differs("the journal of VF %s is missing", v.Address)
	case left.Owner != j.att.Key:
		return plugin.Differs("VF %s belongs to pod %s", v.Address, left.Pod)
	}
	return nil
}

func (j *requestJob) checkPF(c vfCard, v vf) error {
	now, ok, err := j.settingsOnPF(c)
	if err != nil || !ok {
		return err
	}
	want := onPF(v.Wanted, now)
	if v.Fixed != nil {
		want.MAC = v.Fixed
	}
	if !equalVF(now, want) {
		return plugin.Differs("PF %s has these settings for %s: %s; want %s", c.pfLink.Name, v.Name, formatVF(now), formatVF(want))
	}
	return nil
}

func (j *requestJob) checkLink(v vf) error {
	link, ok, err := j.pod.Link(v.Name)
	switch {
	case err != nil:
		return err
	case !ok:
		return plugin.Differs("interface %s of VF %s is missing in the pod", v.Name, v.Address)
	case link.Device != "" && link.Device != v.Address.String():
		return plugin.Differs("interface %s belongs to %s, want VF %s", v.Name, link.Device, v.Address)
	case !link.Up:
		return plugin.Differs("interface %s is down", v.Name)
	}
	if err := j.checkPrevResult(link, v); err != nil {
		return err
	}
	has, err := j.pod.Addresses(link)
	if err != nil {
		return err
	}
	for _, a := range v.Addresses {
		if !slices.Contains(has, a) {
			return plugin.Differs("address %s is missing on %s", a, v.Name)
		}
	}
	for _, route := range v.Routes {
		if ok, err := j.pod.HasRoute(link, route); err != nil {
			return err
		} else if !ok {
			return plugin.Differs("route to %s through %s is missing", route.Dst, v.Name)
		}
	}
	return nil
}

// checkPrevResult compares the interface's MAC and MTU with prevResult, which has the changes of later plugins, or with what ADD set if
// prevResult has none.
func (j *requestJob) checkPrevResult(link kernel.Link, v vf) error {
	i := slices.IndexFunc(j.r.Prev.Interfaces, func(i *types100.Interface) bool { return i.Name == v.Name && i.Sandbox != "" })
	if i < 0 {
		return plugin.Differs("prevResult has no interface %s", v.Name)
	}
	mac, mtu := cmp.Or(j.r.Prev.Interfaces[i].Mac, v.MAC), cmp.Or(j.r.Prev.Interfaces[i].Mtu, v.MTU)
	switch {
	case mac != link.MAC.String():
		return plugin.Differs("interface %s has MAC %s, want %s", v.Name, link.MAC, mac)
	case link.MTU > mtu || link.MTU < mtu && mtu != v.MTU: // later plugins may lower the MTU without reporting the change
		return plugin.Differs("interface %s has mtu %d, want %d", v.Name, link.MTU, mtu)
	}
	return nil
}

func equalVF(a, b kernel.VF) bool {
	equal := func(a, b *bool) bool { return a == nil || b == nil || *a == *b }
	return bytes.Equal(a.MAC, b.MAC) && a.VLAN == b.VLAN && a.QoS == b.QoS && a.Proto == b.Proto && a.LinkState == b.LinkState &&
		equal(a.SpoofCheck, b.SpoofCheck) && equal(a.Trust, b.Trust) && a.MinRate == b.MinRate && a.MaxRate == b.MaxRate
}

// formatVF formats a VF's settings with the keywords of ip-link(8).
func formatVF(v kernel.VF) string {
	onOff := func(on *bool) string {
		if on == nil {
			return "unknown"
		}
		return map[bool]string{true: "on", false: "off"}[*on]
	}
	return fmt.Sprintf("mac %s vlan %d qos %d proto %s spoofchk %s trust %s state %s min_tx_rate %d max_tx_rate %d", v.MAC, v.VLAN, v.QoS,
		v.Proto, onOff(v.SpoofCheck), onOff(v.Trust), v.LinkState, v.MinRate, v.MaxRate)
}

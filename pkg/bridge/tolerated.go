// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"net/netip"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// tolerate logs a difference from the wanted state, or returns it with strictCheck. CHECK tolerates what a tenant may have caused in its
// own pod, an admin may want, or no CNI operation restores, because a failed CHECK may make the runtime recreate the pod, as CRI-O does at
// its start.
func (j *job) tolerate(err error) error {
	if j.cfg.StrictCheck || !plugin.IsDifferent(err) {
		return err
	}
	j.r.Log.Warn("the pod differs from what ADD made; CHECK fails for it only with strictCheck", "error", err)
	return nil
}

// checkTolerated compares the settings of pod and bridge whose changes are errors only with strictCheck, and looks for the record.
func (j *job) checkTolerated(w wiring, l layer3) error {
	var errs []error
	ours := w.host.Name == j.att.HostVeth() // a pod that the reference plugin attached has other names and settings
	ra, known := w.pod.Conf6("accept_ra")
	switch {
	case ours && !attachment.Recorded(j.r):
		errs = append(errs, plugin.Differs("the attachment has no record, so STATUS and GC cannot restore its rules after a flush"))
	case ours && known && ra != 0:
		errs = append(errs, plugin.Differs("%s accepts router advertisements in the pod (accept_ra=%d), want 0", j.r.IfName, ra))
	}
	if w.pod.MTU < w.host.MTU { // a later plugin of the chain may have set it without changing the result
		errs = append(errs, plugin.Differs("%s has mtu %d in the pod, less than the %d of its host side", j.r.IfName, w.pod.MTU, w.host.MTU))
	}
	if w.bridge.MadeFiltered() && !w.bridge.Filtered && j.cfg.Gateway && j.cfg.gatewayName() == w.bridge.Name {
		errs = append(errs, plugin.Differs("nf_call_iptables or nf_call_ip6tables of %s is off: "+
			"a pod may not reach a Service whose backend is on the same bridge", w.bridge.Name))
	}
	if w.bridge.Made() && w.bridge.STP {
		errs = append(errs, plugin.Differs("stp_state of %s is 1: a new pod has no network until the forward delay is over", w.bridge.Name))
	}
	if w.bridge.Made() && w.bridge.NoAgeing {
		errs = append(errs, plugin.Differs("ageing_time of %s is 0: every pod gets the frames of all others", w.bridge.Name))
	}
	if j.lowersMTU(w.bridge) { // ADD lowers the MTU, so it was raised later
		errs = append(errs, plugin.Differs("%s has mtu %d, more than the %d of the pod", w.bridge.Name, w.bridge.MTU, j.cfg.MTU))
	}
	errs = append(errs, j.compareOnLink(w.pod, l))
	for i, err := range errs {
		errs[i] = j.tolerate(err)
	}
	return errors.Join(errs...)
}

// compareOnLink returns an error if the pod lacks an on-link route to one of its gateways, which the kernel adds with the pod's addresses.
func (j *job) compareOnLink(pod kernel.Link, l layer3) error {
	for i, ip := range l.IPs {
		gw, ok := netip.AddrFromSlice(ip.Gateway)
		if gw = gw.Unmap(); !ok || !l.Addresses[i].Masked().Contains(gw) || !pod.Up {
			continue
		}
		m, err := j.pod.MatchRoute(gw)
		if err == nil && m.OnLink && m.Through(pod) {
			continue
		}
		if err != nil && !kernel.NoRoute(err) {
			return err
		}
		return plugin.Differs("%s has no on-link route to the gateway %s in the pod", j.r.IfName, gw)
	}
	return nil
}

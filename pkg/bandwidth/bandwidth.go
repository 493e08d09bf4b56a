// SPDX-License-Identifier: Apache-2.0

// Package bandwidth limits what a pod receives and sends, from the annotations kubernetes.io/ingress-bandwidth and
// kubernetes.io/egress-bandwidth, which runtimes pass as the bandwidth capability. It is chained after a main plugin that connects
// the pod by a veth pair.
//
// What the pod receives is shaped where the node sends it, on the host side of the veth pair. What it sends is redirected, where the
// node receives it, to an intermediate device (ifb) and shaped there, out of reach of a pod that may configure its own interface.
package bandwidth

import (
	"errors"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// state is what the record of an attachment holds; attachments without limits have no record.
type state struct {
	Link    string         `json:"link"` // host side of the veth pair
	Index   int            `json:"index"`
	IFB     string         `json:"ifb,omitempty"`
	Ingress *kernel.Shaper `json:"ingress,omitempty"`
	Egress  *kernel.Shaper `json:"egress,omitempty"`
}

// Plugin returns the bandwidth plugin.
func Plugin() plugin.Plugin {
	return plugin.Plugin{Name: "bandwidth", MinVersion: "0.3.0", Chained: true, Add: add, Del: del, Check: check, GC: gc, Status: status}
}

// ifbName is the reference's, so that the reference plugin removes the device after a rollback.
func ifbName(key attachment.Key) string { return "bwp" + key.ReferenceHash()[:12] }

func add(r *plugin.Request) (result *types100.Result, err error) {
	cfg, err := Parse(r)
	if err != nil {
		return nil, err
	}
	if cfg.none() {
		if attachment.Recorded(r) { // the limits were lifted
			_, err = attachment.Drop(r, removeFromNode)
		}
		return r.Prev, err
	}
	att, err := attachment.Open(r)
	if err != nil {
		return nil, err
	}
	defer att.Close()
	host, err := kernel.Host()
	if err != nil {
		return nil, err
	}
	defer host.Close()
	link, err := hostSide(r, host)
	if err != nil {
		return nil, err
	}
	var old state
	if _, err := att.Load(&old); err != nil {
		return nil, err
	}
	st := cfg.plan(att.Key, link)
	if old.Index != 0 && (old.Link != st.Link || old.Index != st.Index) {
		if err := takeAway(host, old); err != nil {
			return nil, err
		}
		old = state{}
	}
	// Limits of a live pod are changed in place, and those that are lifted go last: it is never without any.
	lifted := old.without(st)
	during := st.with(lifted)
	var undo plugin.Undo
	defer undo.OnError(&err)
	undo.Push(func() error { return remove(host, att, during) })
	if err := att.Save(during); err != nil {
		return nil, err
	}
	if err := apply(r, host, link, st); err != nil {
		return nil, err
	}
	if lifted.Index == 0 {
		return r.Prev, nil
	}
	if err := takeAway(host, lifted); err != nil {
		return nil, err
	}
	return r.Prev, att.Save(st)
}

// without is what of a state has no place in another of the same link; nothing has Index 0.
func (st state) without(next state) state {
	out := state{Link: st.Link}
	if next.Ingress == nil && st.Ingress != nil {
		out.Index, out.Ingress = st.Index, st.Ingress
	}
	if next.IFB == "" && st.IFB != "" {
		out.Index, out.IFB, out.Egress = st.Index, st.IFB, st.Egress
	}
	return out
}

// with is both states of the same link.
func (st state) with(more state) state {
	if more.Ingress != nil {
		st.Ingress = more.Ingress
	}
	if more.IFB != "" {
		st.IFB, st.Egress = more.IFB, more.Egress
	}
	return st
}

// plan is the wanted state of an attachment.
func (c Config) plan(key attachment.Key, link kernel.Link) state {
	st := state{Link: link.Name, Index: link.Index}
	if c.Ingress.Rate > 0 {
		s := c.Ingress.shaper(link.MTU, c.Latency)
		st.Ingress = &s
	}
	if c.Egress.Rate > 0 {
		s := c.Egress.shaper(link.MTU, c.Latency)
		st.Egress, st.IFB = &s, ifbName(key)
	}
	return st
}

func apply(r *plugin.Request, host *kernel.Node, link kernel.Link, st state) error {
	if st.Ingress != nil {
		if err := host.Shape(link, *st.Ingress); err != nil {
			return err
		}
	}
	if st.Egress == nil {
		return nil
	}
	ifb, err := host.EnsureIFB(st.IFB, link)
	if err != nil {
		return err
	}
	if err := host.Shape(ifb, *st.Egress); err != nil {
		return err
	}
	r.Prev.Interfaces = append(r.Prev.Interfaces, &types100.Interface{Name: ifb.Name, Mac: ifb.MAC.String(), Mtu: ifb.MTU})
	if ok, err := host.Redirected(link, ifb); ok || err != nil {
		return err
	}
	return host.Redirect(link, ifb)
}

// hostSide finds the host side of the pod's veth pair, by what the kernel says of its peer.
func hostSide(r *plugin.Request, host *kernel.Node) (kernel.Link, error) {
	pod, err := kernel.Open(r.Netns)
	if err != nil {
		return kernel.Link{}, err
	}
	defer pod.Close()
	inPod, ok, err := pod.Link(r.IfName)
	if err != nil {
		return kernel.Link{}, err
	}
	if !ok {
		return kernel.Link{}, plugin.Errorf(plugin.CodeDevice, "interface %s is missing in the pod", r.IfName)
	}
	var link kernel.Link
	if ok = inPod.Peer != 0; ok {
		if link, ok, err = host.LinkByIndex(inPod.Peer); err != nil {
			return kernel.Link{}, err
		}
	}
	if !ok || inPod.Kind != "veth" || link.Kind != "veth" || link.Peer != inPod.Index {
		return kernel.Link{}, plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "interface %s has no veth peer on the node", r.IfName),
			"bandwidth needs a main plugin that makes a veth pair, such as bridge or ptp")
	}
	return link, nil
}

func del(r *plugin.Request) error {
	found, err := attachment.Drop(r, func(att *attachment.Attachment, st state) error {
		host, err := kernel.Host()
		if err != nil {
			return err
		}
		defer host.Close()
		link, ok, err := host.Link(st.Link)
		if err == nil && ok && r.Netns != nil && link.Index == st.Index && link.LeadsGroup() {
			// The main plugin, whose DEL comes next, deletes the limits with the link, and then the record.
			return nil
		}
		return remove(host, att, st)
	})
	if err != nil || found {
		return err
	}
	return delReference(r)
}

func gc(r *plugin.Request) error { return attachment.Collect(r, removeFromNode) }

func removeFromNode(att *attachment.Attachment, st state) error {
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	return remove(host, att, st)
}

// remove takes the limits away. The record goes last.
func remove(host *kernel.Node, att *attachment.Attachment, st state) error {
	if err := takeAway(host, st); err != nil {
		return err
	}
	return att.Remove()
}

// takeAway takes away what a state names. The redirect goes before the device that it leads to: a pod that lives on must not lose its traffic.
func takeAway(host *kernel.Node, st state) error {
	link, ok, err := host.Link(st.Link)
	errs := []error{err}
	if ok && link.Index == st.Index {
		if st.IFB != "" {
			errs = append(errs, host.DelRedirect(link))
		}
		if st.Ingress != nil {
			errs = append(errs, host.Unshape(link))
		}
	}
	if st.IFB != "" {
		errs = append(errs, host.DelLink(st.IFB))
	}
	return errors.Join(errs...)
}

// status fails only when the configuration is wrong.
func status(r *plugin.Request) error {
	_, err := Parse(r)
	return err
}

// check compares each piece with what ADD would make.
func check(r *plugin.Request) error {
	cfg, err := Parse(r)
	if err != nil || cfg.none() {
		return err
	}
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	link, err := hostSide(r, host)
	if err != nil {
		return err
	}
	want := cfg.plan(attachment.KeyOf(r), link)
	if want.Ingress != nil {
		if err := checkShaper(r, host, link, *want.Ingress); err != nil {
			return err
		}
	}
	if want.Egress == nil {
		return nil
	}
	ifb, ok, err := host.Link(want.IFB)
	if err != nil {
		return err
	}
	if !ok || !ifb.Up {
		return plugin.Errorf(plugin.CodeStateDiffers, "egress: device %s is missing or down", want.IFB)
	}
	if err := checkShaper(r, host, ifb, *want.Egress); err != nil {
		return err
	}
	if ok, err := host.Redirected(link, ifb); err != nil {
		return err
	} else if !ok {
		return plugin.Errorf(plugin.CodeStateDiffers, "egress: the redirect from %s to %s is missing", link.Name, ifb.Name)
	}
	return nil
}

func checkShaper(r *plugin.Request, host *kernel.Node, link kernel.Link, want kernel.Shaper) error {
	has, ok, err := host.Shaped(link)
	if err != nil {
		return err
	}
	if !ok {
		return plugin.Errorf(plugin.CodeStateDiffers, "the token bucket of %s is missing", link.Name)
	}
	// The kernel counts whole bytes per second, and bursts in ticks. The reference computes burst and queue in another way.
	same := has.Limit == want.Limit && near(has.Burst, want.Burst) || !attachment.Recorded(r)
	if has.Rate/8 != want.Rate/8 || !same {
		return plugin.Errorf(plugin.CodeStateDiffers, "the token bucket of %s is %+v, want %+v", link.Name, has, want)
	}
	return nil
}

// near allows for the rounding of a burst to ticks.
func near(a, b uint32) bool {
	difference := max(a, b) - min(a, b)
	return difference <= max(a, b)/50+64
}

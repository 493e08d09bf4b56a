// SPDX-License-Identifier: Apache-2.0

// Package bandwidth limits the traffic that a pod receives and sends. The rates come from the pod annotations
// kubernetes.io/ingress-bandwidth and kubernetes.io/egress-bandwidth, which the runtime passes in the capability bandwidth. The plugin
// follows a main plugin that connects pod and node with a pair of veth or netkit devices.
//
// A token bucket on the host side of the pair limits ingress, which the node sends through it. Egress arrives there and is redirected to an
// ifb (intermediate functional block) device, whose token bucket limits it. Both are in the node's namespace, where even a pod with
// CAP_NET_ADMIN cannot change them.
package bandwidth

import (
	"errors"
	"slices"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

const pluginName = "bandwidth"

// state is the content of an attachment's record. An attachment without limits has none.
type state struct {
	Link  string `json:"link"` // host side of the pair
	Index int    `json:"index"`
	IFB   string `json:"ifb,omitempty"`
	Both[*kernel.Bucket]
	Asked   Both[Limit]   `json:"asked,omitzero"`
	Latency time.Duration `json:"latency,omitempty"`
	Clsact  bool          `json:"clsact,omitempty"` // Podlace added the clsact qdisc that carries the redirect
}

// Plugin returns the bandwidth plugin.
func Plugin() plugin.Plugin {
	return plugin.Plugin{Name: pluginName, MinVersion: "0.3.0", Chained: true, ForeignArgs: true, Add: add, Del: del, Check: check, GC: gc,
		Status: status}
}

const devicePrefix = "bwp"

// ifbName returns the name of the ifb device, which is that of the reference plugin, so that it can remove the device after a rollback.
func ifbName(key attachment.Key) string { return devicePrefix + key.ReferenceHash()[:12] }

func add(r *plugin.Request) (*types100.Result, error) {
	cfg, err := Parse(r)
	if err != nil {
		return nil, err
	}
	attachment.LogOnce(r, unloggedFindings(r.Config))
	if cfg.unlimited() && !attachment.Recorded(r) {
		return nil, nil
	}
	att, err := attachment.Open(r)
	if err != nil {
		return nil, err
	}
	defer att.Close()
	host, err := attachment.Host(r)
	if err != nil {
		return nil, err
	}
	var old state
	if _, err := att.Load(&old); err != nil {
		return nil, err
	}
	if cfg.unlimited() { // the limits were lifted
		return nil, removeLimits(host, att, old)
	}
	link, err := hostSide(r, host)
	if err != nil {
		return nil, err
	}
	fair, err := host.HasFairQueue()
	if err != nil {
		return nil, err
	}
	st := cfg.plan(att.Key, link, fair)
	logBurst(r, "ingress", cfg.Allowed.Ingress, st.Ingress)
	logBurst(r, "egress", cfg.Allowed.Egress, st.Egress)
	if old.Index != 0 && (old.Link != st.Link || old.Index != st.Index) {
		if err := deleteLimits(host, old); err != nil {
			return nil, err
		}
		old = state{}
	}
	if other := host.OtherRoot(link); other != "" && st.Ingress != nil {
		r.Log.Warn("the root qdisc of another program is replaced by the ingress limit", "interface", link.Name, "qdisc", other)
	}
	ifb, err := changeLimits(host, att, link, old, st)
	if err == nil && st.Egress != nil {
		r.Prev.Interfaces = append(r.Prev.Interfaces, &types100.Interface{Name: ifb.Name, Mac: ifb.MAC.String(), Mtu: ifb.MTU})
	}
	return r.Prev, err
}

// changeLimits replaces the limits of a link and returns the ifb device of the egress limit. An error restores the previous limits.
func changeLimits(host *kernel.Node, att *attachment.Attachment, link kernel.Link, old, next state) (ifb kernel.Link, err error) {
	if err := next.recordClsactOwner(host, link, old); err != nil {
		return ifb, err
	}
	var undo plugin.Undo
	defer undo.OnError(&err)
	undo.Push(func() error {
		if old.Index == 0 {
			return removeLimits(host, att, next)
		}
		_, err := replaceLimits(host, att, link, next, old)
		return err
	})
	return replaceLimits(host, att, link, old, next)
}

// replaceLimits changes the limits of a link in place, so that a live pod is never without one, and then removes old limits that next
// lacks.
func replaceLimits(host *kernel.Node, att *attachment.Attachment, link kernel.Link, old, next state) (ifb kernel.Link, err error) {
	lifted := old.subtract(next)
	att.WithLink = true // the kernel deletes qdiscs with their link, and the bridge plugin deletes the ifb with its group
	if err := att.Save(next.merge(lifted)); err != nil {
		return ifb, err
	}
	if ifb, err = applyLimits(host, link, next); err != nil || lifted.Index == 0 {
		return ifb, err
	}
	if err := deleteLimits(host, lifted); err != nil {
		return ifb, err
	}
	return ifb, att.Save(next)
}

// subtract returns the limits of st for the directions in which next has none; both must be of the same link. Index is 0 if nothing
// remains.
func (st state) subtract(next state) state {
	if next.Ingress != nil {
		st.Ingress = nil
	}
	if next.IFB != "" {
		st.IFB = ""
	}
	if st.Ingress == nil && st.IFB == "" {
		st.Index = 0
	}
	return st
}

// merge returns the limits of two states of the same link. Those of more take precedence.
func (st state) merge(more state) state {
	if more.Ingress != nil {
		st.Ingress = more.Ingress
	}
	if more.IFB != "" {
		st.IFB, st.Egress, st.Clsact = more.IFB, more.Egress, more.Clsact
	}
	return st
}

// plan returns the state that ADD should reach.
func (c Config) plan(key attachment.Key, link kernel.Link, fair bool) state {
	st := state{Link: link.Name, Index: link.Index, Asked: c.Asked, Latency: c.Latency}
	st.Ingress = c.Allowed.Ingress.bucket(link.MTU, c.Latency, fair)
	st.setEgress(key, c.Allowed.Egress.bucket(link.MTU, c.Latency, fair))
	return st
}

// setEgress sets the egress limit and the name of the ifb device. A nil bucket means no limit.
func (st *state) setEgress(key attachment.Key, bucket *kernel.Bucket) {
	st.Egress, st.IFB = bucket, ""
	if bucket != nil {
		st.IFB = ifbName(key)
	}
}

// recordClsactOwner records whether Podlace creates the clsact qdisc for the redirect: one that exists belongs to another program.
func (st *state) recordClsactOwner(host *kernel.Node, link kernel.Link, old state) error {
	st.Clsact = st.IFB != "" && old.Clsact
	if st.IFB == "" || old.IFB != "" {
		return nil
	}
	others, err := host.HasClassifiers(link)
	st.Clsact = !others
	return err
}

// hasFairQueues reports whether any of the limits uses a fair queue.
func (st state) hasFairQueues() bool {
	return st.Ingress != nil && st.Ingress.Fair.Packets > 0 || st.Egress != nil && st.Egress.Fair.Packets > 0
}

// applyLimits sets the limits of a link and returns the ifb device of the egress limit.
func applyLimits(host *kernel.Node, link kernel.Link, st state) (ifb kernel.Link, err error) {
	if st.Ingress != nil {
		if err := host.Shape(link, *st.Ingress); err != nil {
			return ifb, err
		}
	}
	if st.Egress == nil {
		return ifb, nil
	}
	if ifb, err = host.EnsureIFB(st.IFB, link); err != nil {
		return ifb, err
	}
	if err := host.Shape(ifb, *st.Egress); err != nil {
		return ifb, err
	}
	return ifb, host.Redirect(link, ifb)
}

// hostSide returns the host side of the pod's link pair. The namespaces of both ends are compared by the IDs that the kernel assigns. It
// fails if prevResult contains another link into the pod instead, because the pod may have exchanged the names of its interfaces.
func hostSide(r *plugin.Request, host *kernel.Node) (kernel.Link, error) {
	pod, err := attachment.Pod(r)
	if err != nil {
		return kernel.Link{}, err
	}
	inPod, ok, err := pod.Link(r.IfName)
	if err != nil {
		return kernel.Link{}, err
	}
	if !ok {
		return kernel.Link{}, plugin.Errorf(plugin.CodeDevice, "interface %s is missing in the pod", r.IfName)
	}
	link, ok, err := host.PeerOf(inPod, r.Netns)
	if err != nil {
		return kernel.Link{}, err
	}
	if !ok {
		return kernel.Link{}, plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "interface %s has no veth or netkit peer on the node", r.IfName),
			"bandwidth needs a main plugin that makes a pair of links, such as bridge or ptp")
	}
	other, err := otherLinkInPrev(r, host, link)
	if err == nil && other != "" {
		err = plugin.Errorf(plugin.CodeDevice, "the host side of interface %s is %s, and prevResult names %s", r.IfName, link.Name, other)
	}
	return link, err
}

// otherLinkInPrev returns the name of a link in prevResult that leads into the pod, or "" if prevResult contains the given link.
func otherLinkInPrev(r *plugin.Request, host *kernel.Node, link kernel.Link) (string, error) {
	if r.Prev == nil || slices.ContainsFunc(r.Prev.Interfaces,
		func(i *types100.Interface) bool { return i.Sandbox == "" && i.Name == link.Name }) {
		return "", nil
	}
	for _, i := range r.Prev.Interfaces {
		if i.Sandbox != "" {
			continue
		}
		named, ok, err := host.Link(i.Name)
		if err == nil && ok {
			ok, err = host.LeadsInto(named, r.Netns)
		}
		if err != nil || ok {
			return i.Name, err
		}
	}
	return "", nil
}

func del(r *plugin.Request) error {
	att, st, recorded, err := attachment.Take[state](r)
	if err != nil {
		return err
	}
	defer att.Close()
	if !recorded {
		return errors.Join(delUnrecorded(r), att.Remove())
	}
	host, err := attachment.Host(r)
	if err != nil {
		return err
	}
	link, ok, err := st.hostSide(host)
	if err == nil && ok && r.Netns != nil && link.LeadsGroup() {
		// The main plugin's DEL comes next and deletes the link with the limits, and then the record (WithLink).
		return nil
	}
	return removeLimits(host, att, st)
}

// gc removes the limits of stale attachments and restores lost limits of the others.
func gc(r *plugin.Request) error {
	host, err := attachment.Host(r)
	if err != nil {
		return err
	}
	gc := attachment.NewGC[state](r)
	for att, st := range gc.Stale() {
		gc.Report(att, removeLimits(host, att, st))
	}
	for hash := range gc.Unreadable() {
		gc.ReportUnreadable(hash, nil) // the limits are deleted with the link
	}
	attachment.ReportRestore(r, attachment.Waiting, Restore(host, r.Log))
	return gc.Err()
}

// removeLimits removes first the limits and then the record.
func removeLimits(host *kernel.Node, att *attachment.Attachment, st state) error {
	if err := deleteLimits(host, st); err != nil {
		return err
	}
	return att.Remove()
}

// deleteLimits removes the limits of a state, the redirect before the ifb device. The device stays if the redirect does, since a live pod
// would lose its traffic without it.
func deleteLimits(host *kernel.Node, st state) error {
	link, ok, err := st.hostSide(host)
	ifb, has := kernel.Link{}, false
	if err == nil && st.IFB != "" {
		ifb, has, err = ifbDevice(host, st.IFB)
	}
	if err == nil && ok && st.IFB != "" {
		err = host.DelRedirect(link, ifb, st.Clsact)
	}
	errs := []error{err}
	if ok && st.Ingress != nil {
		errs = append(errs, host.Unshape(link))
	}
	if has && err == nil {
		errs = append(errs, host.DelLink(ifb.Name))
	}
	return errors.Join(errs...)
}

// hostSide returns the recorded link, found by name, or by ifindex if it was renamed. ok is false for a zero state, which has no link.
func (st state) hostSide(host *kernel.Node) (link kernel.Link, ok bool, err error) {
	if st.Index == 0 {
		return kernel.Link{}, false, nil
	}
	if link, ok, err = host.Link(st.Link); err != nil || ok && link.Index == st.Index {
		return link, ok, err
	}
	link, ok, err = host.LinkByIndex(st.Index)
	return link, ok && link.Kind != "" && link.Peer != 0, err
}

// ifbDevice returns the device with the recorded name if it is an ifb. In a damaged record, it may be another program's link, which must
// not change.
func ifbDevice(host *kernel.Node, name string) (link kernel.Link, ok bool, err error) {
	link, ok, err = host.Link(name)
	if !ok || link.Kind != "ifb" {
		return kernel.Link{}, false, err
	}
	return link, true, nil
}

// status restores lost limits and only logs a failure of that. It fails only for an invalid configuration.
func status(r *plugin.Request) error {
	if _, err := Parse(r); err != nil {
		return err
	}
	host, err := attachment.Host(r)
	if err == nil {
		err = restoreLimits(host, r.Log, attachment.Trying)
	}
	attachment.ReportRestore(r, attachment.Trying, err)
	return nil
}

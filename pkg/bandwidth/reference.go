// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"errors"
	"log/slog"
	"slices"
	"strings"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// delUnrecorded removes the limits of an attachment whose record is lost, or that the reference plugin created. It finds the ifb device by
// its name. Most attachments without a record have no limits, so it searches only if the configuration or prevResult contains some.
func delUnrecorded(r *plugin.Request) error {
	cfg, err := Parse(r)
	asked := err != nil || !cfg.unlimited()
	var devices []string
	for _, hash := range attachment.KeyOf(r).ReferenceHashes(r.Plugin) {
		name := devicePrefix + hash[:12]
		if asked || r.Prev == nil || slices.ContainsFunc(r.Prev.Interfaces, func(i *types100.Interface) bool { return i.Name == name }) {
			devices = append(devices, name)
		}
	}
	if len(devices) == 0 {
		return nil
	}
	host, err := attachment.Host(r)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range devices {
		errs = append(errs, delDevice(r, host, name))
	}
	if asked {
		errs = append(errs, unshapePod(r, host))
	}
	return errors.Join(errs...)
}

// unshapePod removes the pod's ingress limit. If the namespace is unknown, it looks for a link with the name that Podlace's bridge gives to
// the host side; the DEL of any other main plugin deletes link and limit together.
func unshapePod(r *plugin.Request, host *kernel.Node) error {
	link, ok, err := host.Link(attachment.KeyOf(r).HostVeth())
	ok = ok && link.LeadsGroup() // any other link with that name belongs to another program
	if r.Netns != nil {
		link, err = hostSide(r, host)
		if ok = err == nil; !ok {
			return nil // the interface is gone, or Podlace did not set its limits
		}
	}
	if err != nil || !ok {
		return err
	}
	if taken, err := isRecorded(func(st state) bool { return st.Index == link.Index }); taken || err != nil {
		return err
	}
	return host.Unshape(link)
}

// delDevice deletes the redirect to the ifb device with the given name, and then the device, unless another attachment with the same device
// name uses it.
func delDevice(r *plugin.Request, host *kernel.Node, name string) error {
	ifb, ok, err := ifbDevice(host, name)
	if err != nil || !ok {
		return err
	}
	from, used, err := host.RedirectedFrom(ifb)
	if err != nil {
		return err
	}
	if taken, err := isRecordedDevice(name); taken || err != nil {
		return err
	}
	if used {
		if serves, err := mayBelongToPod(r, host, from, name); !serves || err != nil {
			return err
		}
	}
	return deleteLimits(host, state{Link: from.Name, Index: from.Index, IFB: name, Clsact: true})
}

// RemoveUnrecorded removes the ifb devices of a dead attachment that no record names.
func RemoveUnrecorded(host *kernel.Node, key attachment.Key) error {
	var errs []error
	for _, hash := range key.ReferenceHashes(pluginName) {
		errs = append(errs, delDevice(&plugin.Request{}, host, devicePrefix+hash[:12]))
	}
	return errors.Join(errs...)
}

// restoreReferenceRedirects replaces redirects of the reference plugin, which do not match short frames, if their attachment has no record.
func restoreReferenceRedirects(host *kernel.Node, log *slog.Logger) error {
	pairs, err := host.RedirectedLong()
	errs := []error{err}
	for _, p := range pairs {
		if p.To.Kind != "ifb" || !strings.HasPrefix(p.To.Name, devicePrefix) {
			continue
		}
		if taken, err := isRecordedDevice(p.To.Name); taken || err != nil { // the lock of the other attachment protects the device
			errs = append(errs, err)
			continue
		}
		redirectErr := host.Redirect(p.From, p.To)
		_, ok, err := ifbDevice(host, p.To.Name)
		switch {
		case err == nil && !ok: // a DEL has deleted the device: a redirect to it would drop all frames
			errs = append(errs, host.DelRedirect(p.From, kernel.Link{}, true))
		case err != nil || redirectErr != nil:
			errs = append(errs, redirectErr, err)
		default:
			log.Info("an egress limit of the reference plugin now counts frames of all lengths", "link", p.From.Name, "device", p.To.Name)
		}
	}
	return errors.Join(errs...)
}

// isRecorded reports whether any attachment's record matches.
func isRecorded(matches func(state) bool) (bool, error) {
	records, err := attachment.States[state](attachment.AllOf(pluginName))
	return slices.ContainsFunc(records, func(rec attachment.Of[state]) bool { return matches(rec.State) }), err
}

// isRecordedDevice reports whether any record contains an ifb device with the given name.
func isRecordedDevice(name string) (bool, error) {
	return isRecorded(func(st state) bool { return st.IFB == name })
}

// mayBelongToPod reports whether link, whose frames are redirected to the ifb device, can be the host side of the pod's interface. The
// device name is computed from container and interface, so it is enough, even if the pod has renamed its interface. The reference plugin
// has one name for all interfaces of a container, so otherwise the end in the pod must have the requested name.
//
// If the namespace is unknown, the answer is true. A mistake costs a live pod no traffic, because DEL removes the redirect before the
// device.
func mayBelongToPod(r *plugin.Request, host *kernel.Node, link kernel.Link, device string) (bool, error) {
	if r.Netns == nil {
		return true, nil
	}
	pod, err := attachment.Pod(r)
	if err != nil {
		return false, err
	}
	inPod, ok, err := pod.LinkByIndex(link.Peer)
	if err == nil && ok {
		ok, err = host.Paired(link, inPod, r.Netns)
	}
	if !ok || err != nil {
		return false, err
	}
	return device == ifbName(attachment.KeyOf(r)) || inPod.Name == r.IfName, nil
}

// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/podresources"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// askTimeout bounds the time to find out which VFs a pod has. The kubelet is away for seconds when it restarts.
const askTimeout = 10 * time.Second

// daemonTimeout is how much of that the device plugin has, before the kubelet is asked.
const daemonTimeout = allocation.Within + time.Second

// wanted returns the VFs that the pod of an ADD gets, each with its name in the pod; none for a pod that was not allocated any.
func (s sriov) wanted(r *plugin.Request, cfg config) ([]vf, error) {
	vfs, err := s.devices(r, cfg)
	if err != nil {
		return nil, err
	}
	if len(vfs) == 0 && !chained(r) {
		return nil, plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "the pod was allocated no device of %s", strings.Join(cfg.Resources, ", ")),
			"a pod gets one by resources.limits of a container")
	}
	return named(r, cfg, vfs)
}

// devices returns the VFs that the pod of an ADD gets.
func (s sriov) devices(r *plugin.Request, cfg config) ([]vf, error) {
	if cfg.Device.IsValid() {
		return s.chosen(r, cfg)
	}
	devices, err := s.allocated(r, cfg)
	if err != nil {
		return nil, err
	}
	return order(devices, cfg.Resources)
}

// named gives the VFs their names. Called by Multus or as the main plugin, the first one is the interface that the runtime asks for.
func named(r *plugin.Request, cfg config, vfs []vf) ([]vf, error) {
	if cfg.MAC != nil && len(vfs) > 1 {
		return nil, plugin.Errorf(plugin.CodeConfig, "mac %s: the pod has %d VFs, and only one of them could have it", cfg.MAC, len(vfs))
	}
	if len(vfs) > vfconfig.MaxVFs {
		return nil, plugin.Errorf(plugin.CodeDevice, "the pod has %d VFs: want at most %d", len(vfs), vfconfig.MaxVFs)
	}
	first := !chained(r) || cfg.Device.IsValid()
	for i := range vfs {
		v, index := &vfs[i], i+1
		if first {
			index = i // 0 is the interface that the runtime asks for
		}
		v.Fixed, v.wanted = cfg.MAC, cfg.Wanted
		if v.Name = r.IfName; index > 0 {
			v.Name = vfconfig.Named(cfg.Names, index)
		}
		if err := v.configure(r, cfg, index); err != nil {
			return nil, err
		}
		v.Default = v.Name
	}
	if err := choose(r, cfg, vfs); err != nil {
		return nil, err
	}
	for i, v := range vfs {
		if v.Fixed != nil && slices.ContainsFunc(vfs[:i], func(o vf) bool { return bytes.Equal(o.Fixed, v.Fixed) }) {
			return nil, plugin.Errorf(plugin.CodeConfig, "mac %s: two VFs of the pod would have it", v.Fixed)
		}
		if v.Name == r.IfName && v.Default != r.IfName || slices.ContainsFunc(vfs[:i], func(o vf) bool { return o.Name == v.Name }) {
			return nil, plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "two interfaces of the pod would be named %s", v.Name),
				"by ifName %q and the annotation %s", cfg.Names, annotation)
		}
	}
	return vfs, nil
}

// allocated returns the devices of the resources that the kubelet allocated to the pod.
func (s sriov) allocated(r *plugin.Request, cfg config) (devices []allocation.Device, err error) {
	if r.Pod.Name == "" {
		if chained(r) {
			r.Log.Info("no VF is attached: the runtime names no pod")
			return nil, nil
		}
		return nil, plugin.WithHint(plugin.Errorf(plugin.CodeEnvironment,
			"CNI_ARGS: has no K8S_POD_NAME, so nobody knows which VFs there are for the container"),
			"name the VF in deviceID, or call the plugin by a Kubernetes runtime")
	}
	devices, others, err := s.ask(r, cfg)
	if err != nil {
		// Without an answer the pod must not start: it might wait for a VF for ever, or use another interface in its place.
		return nil, plugin.WithHint(plugin.Errorf(plugin.CodeTryAgain, "which VFs the pod has: %w", err), "%s", cfg.hint(err))
	}
	return devices, cfg.attachesAll(others)
}

// attachesAll returns an error if a claim has a VF that no network attaches: its resource is neither of this configuration nor of another
// network.
func (c config) attachesAll(others []allocation.Device) error {
	for _, d := range others {
		if !d.Claim.Admin && !slices.Contains(c.OtherResources, d.Resource) {
			return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "VF %s of claim %s/%s: the configuration of sriov does not name its resource %s",
				d.ID, d.Claim.Namespace, d.Claim.Name, d.Resource),
				"add %s to resources, or to otherResources if another network or the pod itself takes its VFs", d.Resource)
		}
	}
	return nil
}

// hint returns what an admin does when it is not known which VFs a pod has.
func (c config) hint(err error) string {
	switch {
	case errors.Is(err, podresources.ErrNoUID):
		return "the runtime must pass K8S_POD_UID in CNI_ARGS"
	case errors.Is(err, podresources.ErrNoCheckpoint):
		return "no device plugin has registered with the kubelet: take sriov out of the conflist, or start sriov-device-plugin with a resource for this node"
	case errors.Is(err, claim.ErrUnprepared):
		return "does sriov-device-plugin run? It prepares claims"
	case errors.Is(err, allocation.ErrUncertain):
		return "wait a minute: podlace sriov ls shows the VF"
	}
	return "is the kubelet running, and its folder " + c.Kubelet + "? See systemctl status kubelet, podlace sriov"
}

// ask asks the device plugin, and if that does not answer the kubelet, and the records of claims. What these tell is certain, except that
// a pod has no device: a device plugin that runs may have handed out one of which the kubelet tells nothing. others are devices that the
// pod has by claims, of resources that the configuration does not name.
func (s sriov) ask(r *plugin.Request, cfg config) (devices, others []allocation.Device, err error) {
	began := time.Now()
	answer, err := s.askDaemon(r, cfg, began.Add(daemonTimeout))
	if err == nil && answer.Claims && answer.Others != nil {
		return answer.Devices, answer.Others, nil
	}
	devices = slices.DeleteFunc(answer.Devices, func(d allocation.Device) bool { return d.Claim != nil })
	if err != nil {
		if devices, err = s.askKubelet(r, cfg, began.Add(askTimeout), err); err != nil {
			return nil, nil, err
		}
	}
	claimed, err := claim.NewCache(s.claims, cfg.Kubelet).Find(claim.Pod{Namespace: r.Pod.Namespace, Name: r.Pod.Name, UID: r.Pod.UID})
	if err != nil {
		return nil, nil, err
	}
	claimed, others = claim.Split(claimed, cfg.Resources)
	return append(devices, claimed...), others, nil
}

// askKubelet asks the kubelet which devices it allocated, where the device plugin did not answer, for the reason given.
func (s sriov) askKubelet(r *plugin.Request, cfg config, until time.Time, unanswered error) ([]allocation.Device, error) {
	away := errors.Is(unanswered, fs.ErrNotExist) || errors.Is(unanswered, syscall.ECONNREFUSED)
	if !away {
		r.Log.Warn("the kubelet is asked instead", "error", unanswered)
	}
	kubelet := podresources.At(cfg.Kubelet)
	kubelet.Resources, kubelet.Claims = cfg.Resources, claim.InUse(s.claims)
	ctx, cancel := context.WithDeadline(context.Background(), until)
	defer cancel()
	devices, err := podresources.Ask(ctx, kubelet, r.Pod.Namespace, r.Pod.Name, r.Pod.UID)
	switch {
	case away:
		return devices, err
	case err != nil:
		return nil, fmt.Errorf("%w; before that, %w", err, unanswered)
	case len(devices) == 0:
		return nil, fmt.Errorf("the SR-IOV device plugin does not confirm that the pod has no VF: %w", unanswered)
	}
	return devices, nil
}

// askDaemon returns the devices that the device plugin is certain of, without those of claims if it is too old for these.
func (s sriov) askDaemon(r *plugin.Request, cfg config, until time.Time) (allocation.Answer, error) {
	answer, err := allocation.Ask(s.socket, until,
		allocation.Question{Namespace: r.Pod.Namespace, Pod: r.Pod.Name, UID: r.Pod.UID, Resources: cfg.Resources, Claims: true})
	if err != nil {
		return allocation.Answer{}, err
	}
	if !slices.Equal(answer.Resources, cfg.Resources) || answer.UID != r.Pod.UID {
		return allocation.Answer{}, fmt.Errorf("the SR-IOV device plugin tells of %q and UID %q, and not of %q and UID %q: it is older than this plugin",
			answer.Resources, answer.UID, cfg.Resources, r.Pod.UID)
	}
	for _, d := range answer.Devices {
		if d.Namespace != r.Pod.Namespace || d.Pod != r.Pod.Name || !slices.Contains(cfg.Resources, d.Resource) {
			return allocation.Answer{}, fmt.Errorf("the SR-IOV device plugin answers with %s of pod %s/%s", d.Resource, d.Namespace, d.Pod)
		}
	}
	return answer, nil
}

// order sorts the devices of a pod: by container as in the pod, by resource as in the configuration, by address; then those of claims, by
// the claim's name in the pod, in the order of the claim.
func order(devices []allocation.Device, resources []string) (vfs []vf, err error) {
	devices = slices.DeleteFunc(devices, func(d allocation.Device) bool { return d.Claim != nil && d.Claim.Admin })
	of, seen := map[string]pci.Address{}, map[pci.Address]bool{} // by ID
	for _, d := range devices {
		a, err := pci.ParseAddress(d.ID)
		if err != nil {
			return nil, plugin.Errorf(plugin.CodeDevice, "resource %s: the pod has the device %q, which is no VF", d.Resource, d.ID)
		}
		if seen[a] {
			return nil, plugin.Errorf(plugin.CodeDevice, "device %s was allocated to the pod twice", a)
		}
		of[d.ID], seen[a] = a, true
	}
	slices.SortFunc(devices, func(a, b allocation.Device) int {
		return cmp.Or(compareClaims(a.Claim, b.Claim), cmp.Compare(a.Index, b.Index),
			cmp.Compare(slices.Index(resources, a.Resource), slices.Index(resources, b.Resource)), of[a.ID].Compare(of[b.ID]))
	})
	for _, d := range devices {
		vfs = append(vfs, vf{Address: of[d.ID], Claim: d.Claim, config: d.Config})
	}
	return vfs, nil
}

func compareClaims(a, b *allocation.Claim) int {
	switch {
	case a == nil && b == nil:
		return 0
	case a == nil:
		return -1
	case b == nil:
		return 1
	}
	return cmp.Or(strings.Compare(cmp.Or(a.PodClaim, a.Name), cmp.Or(b.PodClaim, b.Name)), strings.Compare(a.UID, b.UID),
		cmp.Compare(a.Result, b.Result))
}

// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// askTimeout limits the search for the VFs of a pod. A kubelet that restarts does not answer for some seconds.
const askTimeout = 10 * time.Second

// daemonTimeout is the part of askTimeout after which the plugin asks the kubelet in place of the device plugin.
const daemonTimeout = poddevices.AnswerTimeout + time.Second

// wantedVFs returns the VFs for the pod of an ADD, if any, with their interface names in the pod.
func (s sriov) wantedVFs(r *plugin.Request, cfg requestConfig) ([]vf, error) {
	vfs, err := s.podDevices(r, cfg)
	if err != nil {
		return nil, err
	}
	if len(vfs) == 0 && !isChained(r) {
		return nil, plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "the pod has no device of %s", strings.Join(cfg.Resources, ", ")),
			"request one in resources.limits of a container or by a ResourceClaim, or remove sriov from the networks of this pod")
	}
	return assignNames(r, cfg, vfs)
}

func (s sriov) podDevices(r *plugin.Request, cfg requestConfig) ([]vf, error) {
	if cfg.Device.IsValid() {
		return s.namedVF(r, cfg)
	}
	devices, err := s.allocatedDevices(r, cfg)
	if err != nil {
		return nil, err
	}
	return sortDevices(devices, cfg.Resources)
}

// assignNames sets the interface names of the VFs. The first gets CNI_IFNAME if Multus calls the plugin or sriov is the main plugin.
func assignNames(r *plugin.Request, cfg requestConfig, vfs []vf) ([]vf, error) {
	if cfg.MAC != nil && len(vfs) > 1 {
		return nil, plugin.Errorf(plugin.CodeConfig, "mac %s: only one VF can have it, but the pod has %d VFs", cfg.MAC, len(vfs))
	}
	if len(vfs) > vfconfig.MaxVFs {
		return nil, plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "the pod has %d VFs: want at most %d", len(vfs), vfconfig.MaxVFs),
			"request fewer in resources.limits and ResourceClaims")
	}
	first := !isChained(r) || cfg.Device.IsValid()
	for i := range vfs {
		v, index := &vfs[i], i+1
		if first {
			index = i // 0 is the interface that the runtime requires
		}
		v.Fixed, v.Wanted = cfg.MAC, cfg.Wanted
		if v.Name = r.IfName; index > 0 {
			v.Name = vfconfig.ExpandName(cfg.Names, index)
		}
		if err := v.applyClaim(r, cfg, index); err != nil {
			return nil, err
		}
		v.Default = v.Name
	}
	if err := applyChoices(r, cfg, vfs); err != nil {
		return nil, err
	}
	return vfs, checkDistinct(r, cfg, vfs)
}

// checkDistinct returns an error if two interfaces of the pod would have the same MAC or name.
func checkDistinct(r *plugin.Request, cfg requestConfig, vfs []vf) error {
	for i := range vfs {
		v := &vfs[i]
		same := func(isSame func(o vf) bool) string {
			if j := slices.IndexFunc(vfs[:i], isSame); j >= 0 {
				return vfs[j].ownerText() + " and " + v.ownerText()
			}
			return ""
		}
		if both := same(func(o vf) bool { return v.Fixed != nil && bytes.Equal(o.Fixed, v.Fixed) }); both != "" {
			return plugin.Errorf(plugin.CodeConfig, "mac %s: two VFs of the pod would have the same MAC: %s", v.Fixed, both)
		}
		both := same(func(o vf) bool { return o.Name == v.Name })
		if v.Name == r.IfName && v.Default != r.IfName {
			both = v.ownerText() + " and the interface of the runtime"
		}
		if both != "" {
			return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "two interfaces of the pod would be named %s: %s", v.Name, both),
				"change ifName of the claim, ifName %q of the conflist, or the annotation %s", cfg.Names, annotationKey)
		}
	}
	return nil
}

// allocatedDevices returns the pod's devices of the configured resources.
func (s sriov) allocatedDevices(r *plugin.Request, cfg requestConfig) (devices []poddevices.Device, err error) {
	if r.Pod.Name == "" {
		if isChained(r) {
			r.Log.Info("no VF is attached: the runtime passes no pod name")
			return nil, nil
		}
		return nil, plugin.WithHint(plugin.Errorf(plugin.CodeEnvironment,
			"CNI_ARGS has no K8S_POD_NAME, so the container's VFs are unknown"),
			"name the VF in deviceID, or use a Kubernetes runtime")
	}
	devices, others, err := s.askDevices(r, cfg)
	if err != nil {
		// ADD fails closed: without its VF, a pod might wait forever or use another interface.
		return nil, plugin.WithHint(plugin.Errorf(plugin.CodeTryAgain, "find the VFs of the pod: %w", err), "%s", cfg.hintFor(err))
	}
	return devices, cfg.checkAttached(others)
}

// checkAttached returns an error if no network attaches the VF of one of the pod's claims, because its resource is in neither
// `resources` nor `otherResources`.
func (c requestConfig) checkAttached(others []poddevices.Device) error {
	for _, d := range others {
		if !d.Claim.Admin && !slices.Contains(c.OtherResources, d.Resource) {
			return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "VF %s of claim %s/%s: its resource %s is missing from the configuration of sriov",
				d.ID, d.Claim.Namespace, d.Claim.Name, d.Resource),
				"add %s to resources, or to otherResources if another network attaches its VFs or the pod uses them directly", d.Resource)
		}
	}
	return nil
}

// hintFor returns a hint for the admin about an error in the search for the pod's VFs.
func (c requestConfig) hintFor(err error) string {
	switch {
	case errors.Is(err, poddevices.ErrNoUID):
		return "the runtime must pass K8S_POD_UID in CNI_ARGS"
	case errors.Is(err, poddevices.ErrNoCheckpoint):
		return "no device plugin has registered with the kubelet: remove sriov from the conflist, or start sriov-device-plugin with a resource for this node"
	case errors.Is(err, poddevices.ErrUnprepared):
		return "check that sriov-device-plugin is running, because it prepares claims"
	case errors.Is(err, poddevices.ErrUncertain):
		return "retry in a minute: 'podlace sriov ls' shows the VF"
	case errors.Is(err, poddevices.ErrNoProgram): // last, because the refusal of a device plugin that answers says more
		return "install " + poddevices.Program + " beside sriov, and start sriov-device-plugin: systemctl status sriov-device-plugin"
	}
	return "check that the kubelet is running with the folder " + c.Kubelet + ": systemctl status kubelet, podlace sriov ls"
}

// askDevices returns the devices of the pod from the device plugin, or else from the kubelet and the claim records. A device in the
// answer is certain, but its absence is not, because the kubelet lists a new device only after a delay. others are the devices of the
// pod's claims whose resources are not in the configuration.
func (s sriov) askDevices(r *plugin.Request, cfg requestConfig) (devices, others []poddevices.Device, err error) {
	began := time.Now()
	answer, err := s.askDaemon(r, cfg, began.Add(daemonTimeout))
	if err == nil {
		return answer.Devices, answer.Others, nil
	}
	if devices, err = s.askKubelet(r, cfg, began.Add(askTimeout), err); err != nil {
		return nil, nil, err
	}
	claimed, err := claim.NewCache(s.claims, cfg.Kubelet).Find(claim.Pod{Namespace: r.Pod.Namespace, Name: r.Pod.Name, UID: r.Pod.UID})
	if err != nil {
		return nil, nil, err
	}
	claimed, others = claim.Split(claimed, cfg.Resources)
	return append(devices, claimed...), others, nil
}

// askKubelet asks the kubelet for the pod's devices. unanswered is the error from the device plugin.
func (s sriov) askKubelet(r *plugin.Request, cfg requestConfig, until time.Time, unanswered error) ([]poddevices.Device, error) {
	away := errors.Is(unanswered, fs.ErrNotExist) || errors.Is(unanswered, syscall.ECONNREFUSED)
	if !away {
		r.Log.Warn("no answer from the SR-IOV device plugin; asking the kubelet instead", "error", unanswered)
	}
	devices, err := poddevices.AskKubelet(r.Path, poddevices.KubeletQuestion{Folder: cfg.Kubelet, InUse: claim.InUse(s.claims),
		Timeout:  time.Until(until),
		Question: poddevices.Question{Namespace: r.Pod.Namespace, Pod: r.Pod.Name, UID: r.Pod.UID, Resources: cfg.Resources}})
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

func (s sriov) askDaemon(r *plugin.Request, cfg requestConfig, until time.Time) (poddevices.Answer, error) {
	answer, err := poddevices.Ask(s.socket, until,
		poddevices.Question{Namespace: r.Pod.Namespace, Pod: r.Pod.Name, UID: r.Pod.UID, Resources: cfg.Resources})
	if err != nil {
		return poddevices.Answer{}, err
	}
	for _, d := range answer.Devices {
		if d.Namespace != r.Pod.Namespace || d.Pod != r.Pod.Name || !slices.Contains(cfg.Resources, d.Resource) {
			return poddevices.Answer{}, fmt.Errorf("the SR-IOV device plugin answers with a device of %s of pod %s/%s", d.Resource, d.Namespace, d.Pod)
		}
	}
	return answer, nil
}

// sortDevices sorts devices by container, then by resource in the order of the configuration, then by address. Those of claims are
// last, by the claim's name in the pod and their order in the claim.
func sortDevices(devices []poddevices.Device, resources []string) (vfs []vf, err error) {
	devices = slices.DeleteFunc(devices, func(d poddevices.Device) bool { return d.Claim != nil && d.Claim.Admin })
	of, seen := map[string]pci.Address{}, map[pci.Address]bool{} // by ID
	for _, d := range devices {
		a, err := pci.ParseAddress(d.ID)
		if err != nil {
			return nil, plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "resource %s: the pod's device %q is not a VF", d.Resource, d.ID),
				"it is a resource of another device plugin: remove it from resources in the conflist")
		}
		if seen[a] {
			return nil, plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "device %s was allocated to the pod twice", a),
				"two device plugins offer it ('podlace sriov explain %s'): stop one, and delete the pod", a)
		}
		of[d.ID], seen[a] = a, true
	}
	slices.SortFunc(devices, func(a, b poddevices.Device) int {
		return cmp.Or(compareClaims(a.Claim, b.Claim), cmp.Compare(a.Index, b.Index),
			cmp.Compare(slices.Index(resources, a.Resource), slices.Index(resources, b.Resource)), of[a.ID].Compare(of[b.ID]))
	})
	for _, d := range devices {
		vfs = append(vfs, vf{Address: of[d.ID], Claim: d.Claim, config: d.Config})
	}
	return vfs, nil
}

func compareClaims(a, b *poddevices.Claim) int {
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

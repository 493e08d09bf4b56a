// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/podlace/podlace/pkg/poddevices"
)

// Pod identifies a pod by what the runtime passes to a CNI plugin.
type Pod struct{ Namespace, Name, UID string }

// Find returns the devices that a pod has through claims, including those with administrative access. After an error, the pod may have
// devices that Find could not determine, so the caller must refuse to start it.
//
// Besides the kubelet's file, which lists the claims of each pod, Find reads the records that are reserved for the pod, and misses a
// device only if both are wrong. If the kubelet's file cannot be read, a pod certainly has no claim if no claim is prepared in its
// namespace.
func (c *Cache) Find(pod Pod) (devices []poddevices.Device, err error) {
	of, stateErr := c.claimsOf(pod.UID)
	if pod.UID == "" {
		of, stateErr = nil, errors.New("the runtime does not pass the pod's UID")
	}
	if stateErr != nil {
		return nil, c.checkNoClaims(pod.Namespace, stateErr)
	}
	var found []Record
	for _, n := range of {
		r, err := Read(c.folder, n.UID)
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: it has no record in %s", poddevices.ErrUnprepared, c.folder)
		}
		if err != nil {
			return nil, fmt.Errorf("the pod has %s: %w", n, err)
		}
		found = append(found, r)
	}
	reserved, err := c.reservedFor(pod.UID)
	if err != nil {
		return nil, err
	}
	for _, r := range reserved {
		if !slices.ContainsFunc(found, func(f Record) bool { return f.Claim().UID == r.Claim().UID }) {
			found = append(found, r)
		}
	}
	for _, r := range found {
		if r.State != Prepared {
			return nil, fmt.Errorf("the pod has %s: %w", r, poddevices.ErrUnprepared)
		}
		for _, d := range r.Devices {
			d.Namespace, d.Pod, d.UID = pod.Namespace, pod.Name, pod.UID
			devices = append(devices, d)
		}
	}
	return devices, nil
}

// checkNoClaims returns nil if a namespace has no prepared claim. Otherwise its error says why the pod's claims are unknown.
func (c *Cache) checkNoClaims(namespace string, reason error) error {
	var found error
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.walkFiles(func(f *recordFile) error {
		r, err := f.decode()
		if err == nil && found == nil && r.Claim().Namespace == namespace {
			found = fmt.Errorf("the pod may have %s: %w", r, reason)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("find the claims of the pod: %w; %w", reason, err)
	}
	return found
}

// Split separates the devices of the given resources from all others. It never returns nil.
func Split(devices []poddevices.Device, resources []string) (of, others []poddevices.Device) {
	of, others = []poddevices.Device{}, []poddevices.Device{}
	for _, d := range devices {
		if slices.Contains(resources, d.Resource) {
			of = append(of, d)
		} else {
			others = append(others, d)
		}
	}
	return of, others
}

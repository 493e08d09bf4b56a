// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/podlace/podlace/pkg/allocation"
)

// ErrUnprepared is for a pod that has a claim which is not prepared, or whose record is lost.
var ErrUnprepared = errors.New("it is not prepared")

// Pod is a pod as a CNI plugin knows it.
type Pod struct{ Namespace, Name, UID string }

// Find returns the devices that a pod has by claims, those of administrators included. An error means that it may have some: the pod must
// not start without them. kubelet is the kubelet's root folder.
//
// The kubelet's file says which claims are the pod's. A record that was reserved for the pod counts as well, so that both have to be wrong
// before a device is missing. Where the file cannot be read, only a pod in whose namespace no claim is prepared is certain to have none.
func Find(folder, kubelet string, pod Pod) (devices []allocation.Device, err error) {
	of, stateErr := claims(stateFile(kubelet), pod.UID)
	if pod.UID == "" {
		of, stateErr = nil, errors.New("the runtime does not pass the pod's UID")
	}
	if stateErr != nil {
		return nil, none(folder, pod.Namespace, stateErr)
	}
	var found []Record
	for _, n := range of {
		r, err := Read(folder, n.UID)
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: there is no record of it in %s", ErrUnprepared, folder)
		}
		if err != nil {
			return nil, fmt.Errorf("the pod has %s: %w", n, err)
		}
		found = append(found, r)
	}
	reserved, err := reservedFor(folder, pod.UID)
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
			return nil, fmt.Errorf("the pod has %s: %w", r, ErrUnprepared)
		}
		for _, d := range r.Devices {
			d.Namespace, d.Pod, d.UID = pod.Namespace, pod.Name, pod.UID
			devices = append(devices, d)
		}
	}
	return devices, nil
}

// reservedFor returns the records that were reserved for a pod. Records of other pods are not parsed: there may be many.
func reservedFor(folder, podUID string) (records []Record, err error) {
	err = walk(folder, func(uid string, data []byte) error {
		if !bytes.Contains(data, []byte(podUID)) {
			return nil
		}
		r, err := decode(uid, data)
		if err == nil && slices.ContainsFunc(r.Reserved, func(c Consumer) bool { return c.UID == podUID }) {
			records = append(records, r)
		}
		return err
	})
	return records, err
}

// none is nil where no claim of a namespace is prepared. The reason is why it is not known which claims a pod has.
func none(folder, namespace string, reason error) error {
	records, err := List(folder)
	if err != nil {
		return fmt.Errorf("which claims the pod has: %w; %w", reason, err)
	}
	for _, r := range records {
		if r.Claim().Namespace == namespace {
			return fmt.Errorf("the pod may have %s: %w", r, reason)
		}
	}
	return nil
}

// Split returns the devices that are of resources, and the others; neither is nil.
func Split(devices []allocation.Device, resources []string) (of, others []allocation.Device) {
	of, others = []allocation.Device{}, []allocation.Device{}
	for _, d := range devices {
		if slices.Contains(resources, d.Resource) {
			of = append(of, d)
		} else {
			others = append(others, d)
		}
	}
	return of, others
}

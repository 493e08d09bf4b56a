// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/podresources"
	"github.com/podlace/podlace/pkg/store"
)

const (
	// settling is how long after a kubelet has started its answer may lack pods that run: it answers before it knows all of them. Meanwhile
	// a pod that ends before the first answer seems to have its devices.
	settling = 15 * time.Second
	// handing is how long a device that was handed out may be missing in that answer.
	handing = time.Minute
)

// checkpointName is the file in which the kubelet remembers what it gave away, in the folder of its socket.
const checkpointName = "kubelet_internal_checkpoint"

// checkpoint is the kubelet with its file, to be asked about some resources.
func (d *daemon) checkpoint(want func(resource string) bool) podresources.Kubelet {
	return podresources.Kubelet{Socket: d.podsSocket(), Checkpoint: filepath.Join(d.Kubelet.Plugins, checkpointName), Wanted: want}
}

// remembered returns what the kubelet remembers. It may be of pods that have ended, whose names are not in it. The version is that of the file, if
// that is as kubelets write it.
func (d *daemon) remembered() (held []Holder, version string) {
	notes, version, _ := podresources.Notes(d.checkpoint(nil).Checkpoint) // without it the kubelet has given nothing away yet
	for _, n := range notes {
		h := Holder{Pod: "uid " + n.UID, Container: n.Container, Resource: n.Resource, Device: n.ID}
		if n.Node >= 0 {
			h.Nodes = []int{n.Node}
		}
		held = append(held, h)
	}
	return held, version
}

// among tells whether all holders are among others, by container and not by pod. Where nobody has a device the others have none either.
func among(others, held []Holder) bool {
	type grant [3]string
	of := func(h Holder) grant { return grant{h.Container, h.Resource, h.Device} }
	all := map[grant]bool{}
	for _, h := range others {
		all[of(h)] = true
	}
	return (len(held) > 0 || len(others) == 0) && !slices.ContainsFunc(held, func(h Holder) bool { return !all[of(h)] })
}

// tellTrust lets the sriov plugin believe a checkpoint of a kubelet, or none.
func (d *daemon) tellTrust(trust []byte) {
	if d.Socket == "" {
		return
	}
	path := d.Socket + podresources.TrustSuffix
	dir, err := store.Make(filepath.Dir(path), 0o700)
	if err == nil {
		defer dir.Close()
		if trust != nil {
			err = dir.Write(filepath.Base(path), trust, 0o600)
		} else {
			err = dir.Remove(filepath.Base(path))
		}
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		d.log.Warn("the sriov plugin asks for each pod", "error", err)
	}
}

func (d *daemon) podsSocket() string { return filepath.Join(d.Pods, "kubelet.sock") }

// askPods learns which pods have devices, and tells whether that changed. A kubelet that is away, or has just started, may know less than the
// file in which it remembers: then both count, but for devices of which it has told since, which it forgets in that file later.
func (d *daemon) askPods(ctx context.Context) (changed bool) {
	id, _ := idOf(d.podsSocket())
	// What is believed is read before the kubelet is asked: devices that it gives away in between are told, and those later are in another version.
	mark, _ := d.checkpoint(nil).Mark()
	remembered, version := d.remembered()
	held, err := d.pods.List(ctx, func(string) bool { return true })
	if err != nil {
		d.log.Debug("it is not known which pods have devices", "error", err)
	}
	var trust []byte
	if err == nil && mark != "" && version != "" && among(remembered, held) {
		var pods []string
		for _, h := range held {
			pods = append(pods, h.Namespace+"/"+h.Pod)
		}
		slices.Sort(pods)
		trust = podresources.Trust(mark, version, slices.Compact(pods))
	}
	d.tellTrust(trust)
	allocatable, countErr := d.pods.Allocatable(ctx)
	if err == nil && countErr != nil {
		d.log.Debug("it is not known what the kubelet may give away", "error", countErr)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.counted = map[string]int{}
	for resource, devices := range allocatable {
		d.counted[resource] = len(devices)
	}
	now := time.Now()
	if id != d.answers {
		d.answers, d.since, d.told = id, now, map[string]bool{}
	}
	for _, h := range held {
		d.told[h.Device] = true
		if s := d.serving[h.Resource]; s != nil {
			s.listed(h.Device)
		}
	}
	if err != nil || now.Before(d.since.Add(settling)) {
		held = merge(held, slices.DeleteFunc(remembered, func(h Holder) bool { return d.told[h.Device] }))
	}
	if err != nil {
		held = merge(held, d.held)
	}
	changed = err == nil && !d.asked || !slices.EqualFunc(held, d.held, Holder.equal)
	d.held, d.asked = held, d.asked || err == nil
	return changed
}

// merge adds those holders whose devices nobody has.
func merge(held, more []Holder) []Holder {
	for _, h := range more {
		if !slices.ContainsFunc(held, func(o Holder) bool { return o.Device == h.Device }) {
			held = append(held, h)
		}
	}
	return held
}

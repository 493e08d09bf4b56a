// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1alpha1"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/sriov"
)

// Containers read the attributes and addresses of their devices in metadata files (KEP-5304), one for each request of a claim. The
// Kubernetes library writes them after Prepare with a CDI specification that mounts them, and removes them after Unprepare. A failure
// of either is logged and changes nothing for the pod, which then has no file.

// metadataFolder is the library's folder of metadata files, <namespace>_<claim>/<request>/metadata.json.
func (o Options) metadataFolder() string {
	_, data := o.socketFolders()
	return filepath.Join(data, "dra-device-metadata")
}

// metadataOptions returns the options that switch the library's metadata on. KubeVirt 1.8 reads only v1alpha1.
func (d *Driver) metadataOptions() []kubeletplugin.Option {
	remove := func(path string) error {
		if err := os.RemoveAll(path); err != nil {
			d.options.Log.Warn("could not remove device metadata; retrying every minute", "path", path, "error", err)
		}
		return nil
	}
	versions := []schema.GroupVersion{v1beta1.SchemeGroupVersion, v1alpha1.SchemeGroupVersion}
	return []kubeletplugin.Option{kubeletplugin.EnableDeviceMetadata(d.options.CDI != "", versions), kubeletplugin.CDIDirectory(d.options.CDI),
		kubeletplugin.MetadataFileOps(kubeletplugin.MetadataFileOperations{WriteFile: overwrite, RemoveAll: remove, Remove: remove})}
}

// overwrite writes a file and keeps its inode, which containers have mounted: they would not see a new file in its place. It reserves
// the space first, so that a full disk leaves the former content.
func overwrite(name string, data []byte, mode fs.FileMode) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE, mode)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, int64(len(data))); err != nil {
		return &fs.PathError{Op: "allocate", Path: name, Err: err}
	}
	if _, err := f.WriteAt(data, 0); err != nil {
		return err
	}
	return f.Truncate(int64(len(data)))
}

// metadataOf returns what the metadata file of a device contains. h is its attachment, or nil if no pod has the device.
func metadataOf(attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute, h *sriov.Holding) *kubeletplugin.DeviceMetadata {
	m := &kubeletplugin.DeviceMetadata{Attributes: map[string]resourceapi.DeviceAttribute{}, NetworkData: networkData(h)}
	for name, a := range attributes {
		m.Attributes[string(name)] = a
	}
	return m
}

// metadataLoop updates metadata files after ADD or DEL has changed a journal, until ctx is done. ADD does not wait for it, but it is
// usually done before the runtime starts the first container.
func (d *Driver) metadataLoop(ctx context.Context) {
	if d.options.CDI == "" {
		return
	}
	journals := d.watchJournals(ctx)
	seen := map[string]string{}
	for ctx.Err() == nil {
		wait := collectEvery
		if !d.updateMetadata(ctx, seen) {
			wait = restartPause
		}
		select {
		case <-ctx.Done():
		case <-journals:
		case <-time.After(wait):
			clear(seen)
		}
	}
}

// updateMetadata updates the metadata of all prepared claims, and reports whether nothing remains to be done. seen maps the UIDs of
// claims to attachments for which nothing remains.
func (d *Driver) updateMetadata(ctx context.Context, seen map[string]string) bool {
	records, _ := d.records.List() // unreadable records are skipped
	held, err := sriov.Holdings()
	helper := d.server()
	if err != nil || helper == nil {
		return false
	}
	done := true
	for _, r := range records {
		uid, text := r.Claim().UID, ""
		for _, dev := range r.Devices {
			text += fmt.Sprintln(networkData(holdingOf(held, uid, dev.Claim.Device)))
		}
		if r.State != claim.Prepared || seen[uid] == text {
			continue
		}
		err := d.updateClaimMetadata(ctx, helper, r.Claim(), held)
		if d.failures.isDue("metadata "+uid, err, time.Now()) {
			d.options.Log.Warn("could not update the device metadata of a claim; retrying", "claim", r.String(), "error", err)
		}
		if err == nil {
			seen[uid] = text
		}
		done = done && err == nil
	}
	return done
}

// updateClaimMetadata writes the network data of attachments into the metadata files of a claim. It is a no-op if they have it, or if
// the claim was prepared without files.
func (d *Driver) updateClaimMetadata(ctx context.Context, helper *kubeletplugin.Helper, c poddevices.Claim, held []sriov.Holding) error {
	files, err := filepath.Glob(filepath.Join(d.options.metadataFolder(), c.Namespace+"_"+c.Name, "*", "metadata.json"))
	errs := []error{err}
	for _, path := range files {
		m, err := readMetadata(path)
		errs = append(errs, err)
		if string(m.UID) != c.UID { // the file of a later claim with the same name
			continue
		}
		for _, request := range m.Requests {
			var devices []kubeletplugin.Device
			changed := false
			for _, dev := range request.Devices {
				now := metadataOf(dev.Attributes, holdingOf(held, c.UID, dev.Name))
				changed = changed || !equality.Semantic.DeepEqual(now.NetworkData, dev.NetworkData)
				devices = append(devices, kubeletplugin.Device{PoolName: dev.Pool, DeviceName: dev.Name, Metadata: now})
			}
			if changed {
				errs = append(errs, helper.UpdateRequestMetadata(ctx, c.Namespace, c.Name, m.UID, request.Name, devices))
			}
		}
	}
	return errors.Join(errs...)
}

// readMetadata reads a metadata file. An empty one, which a full disk leaves at Prepare and no container has, belongs to no claim.
func readMetadata(path string) (m metadata.DeviceMetadata, err error) {
	data, err := os.ReadFile(path)
	if err != nil || len(data) == 0 {
		return m, err
	}
	if err := devicemetadata.DecodeMetadataFromStream(json.NewDecoder(bytes.NewReader(data)), &m); err != nil {
		return m, fmt.Errorf("%s: %w", path, err)
	}
	return m, nil
}

// removeStaleMetadata removes metadata that is older than orphanedAfter and whose claim has neither a record nor an entry in the
// kubelet's file. It may be left when the collector has unprepared a claim, or when its removal failed.
func (c *collector) removeStaleMetadata(records []claim.Record, notes []claim.KubeletClaim, now time.Time) error {
	used := map[string]bool{}
	for _, r := range records {
		used[r.Claim().Namespace+"_"+r.Claim().Name], used[r.Claim().UID] = true, true
	}
	for _, n := range notes {
		used[n.Namespace+"_"+n.Name], used[n.UID] = true, true
	}
	folders, err1 := filepath.Glob(filepath.Join(c.options.metadataFolder(), "*"))
	specs, err2 := filepath.Glob(filepath.Join(c.options.CDI, claim.Driver+"_metadata_*"))
	errs := []error{err1, err2}
	for _, path := range append(folders, specs...) {
		owner := filepath.Base(path) // <namespace>_<claim>, or <driver>_metadata_<uid>_<request>.json
		if spec, ok := strings.CutPrefix(owner, claim.Driver+"_metadata_"); ok {
			owner, _, _ = strings.Cut(spec, "_")
		}
		info, err := os.Stat(path)
		if err == nil && !used[owner] && now.Sub(info.ModTime()) >= orphanedAfter {
			err = os.RemoveAll(path)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1alpha1"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/sriov"
	"github.com/podlace/podlace/pkg/store"
)

// Containers read the attributes and addresses of their devices in metadata files (KEP-5304), one for each request of a claim. The
// Kubernetes library writes them after Prepare with a CDI specification that mounts them, and removes them after Unprepare. A failure
// of either is logged and changes nothing for the pod, which then has no file. A container would not see a new inode in place of its
// file, so the content is saved beside the file, atomically, and then written into it.
const (
	metadataFile   = "metadata.json"
	savedMetadata  = "saved.json"
	metadataPrefix = claim.Driver + "_metadata_" // of the CDI specifications <prefix><uid>_<request>.json
)

// metadataFolder is the library's folder of metadata files, <namespace>_<claim>/<request>/metadata.json.
func (o Options) metadataFolder() string {
	_, data := o.socketFolders()
	return filepath.Join(data, "dra-device-metadata")
}

// metadataOptions returns the options that switch the library's metadata on. KubeVirt 1.8 reads only v1alpha1.
func (d *Driver) metadataOptions() []kubeletplugin.Option {
	remove := func(path string) error {
		if err := d.removeMetadata(path); err != nil {
			d.options.Log.Warn("could not remove device metadata; retrying every minute", "path", path, "error", err)
		}
		return nil
	}
	ops := kubeletplugin.MetadataFileOperations{WriteFile: d.writePrepared, RemoveAll: remove, Remove: remove}
	versions := []schema.GroupVersion{v1beta1.SchemeGroupVersion, v1alpha1.SchemeGroupVersion}
	return []kubeletplugin.Option{kubeletplugin.EnableDeviceMetadata(d.options.CDI != "", versions),
		kubeletplugin.CDIDirectory(d.options.CDI), kubeletplugin.MetadataFileOps(ops)}
}

// writePrepared writes a metadata file or its CDI specification for Prepare.
func (d *Driver) writePrepared(path string, data []byte, _ fs.FileMode) error {
	d.metadata.Lock()
	defer d.metadata.Unlock()
	var err error
	before, _ := os.ReadFile(filepath.Join(filepath.Dir(path), savedMetadata))
	if ownerOf(before) != ownerOf(data) { // no container of a former claim with this name may see the new content
		err = os.RemoveAll(path)
	}
	return errors.Join(err, writeMetadata(path, data))
}

// writeMetadata writes a CDI specification, or a metadata file that lacks this content.
func writeMetadata(path string, data []byte) error {
	folder, name := filepath.Split(path)
	dir, err := store.Make(folder, 0o755)
	if err != nil {
		return err
	}
	defer dir.Close()
	if name != metadataFile {
		return dir.Write(name, data, 0o644)
	}
	if now, err := dir.Read(name); err == nil && bytes.Equal(now, data) {
		return nil
	}
	if err := dir.Write(savedMetadata, data, 0o644); err != nil {
		return err
	}
	return dir.Overwrite(name, data, 0o644)
}

// metadataOf returns what the metadata file of a device contains. h is its attachment, or nil if no pod has the device.
func metadataOf(attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute, h *sriov.Holding) *kubeletplugin.DeviceMetadata {
	m := &kubeletplugin.DeviceMetadata{Attributes: map[string]resourceapi.DeviceAttribute{}, NetworkData: networkData(h)}
	for name, a := range attributes {
		m.Attributes[string(name)] = a
	}
	return m
}

// metadataLoop updates metadata files after each change of a journal and every 10 s, until ctx is done.
func (d *Driver) metadataLoop(ctx context.Context) {
	for journals := d.watchJournals(ctx); ctx.Err() == nil; {
		d.updateMetadata()
		select {
		case <-ctx.Done():
		case <-journals:
		case <-time.After(rebuildEvery):
		}
	}
}

// updateMetadata writes the attachments of all claims into their metadata files. ADD does not wait for it, but it is usually done before
// the runtime starts the first container.
func (d *Driver) updateMetadata() {
	records, _ := d.records.List() // unreadable records are skipped
	held, err := sriov.Holdings()
	if err != nil {
		return
	}
	for _, r := range records {
		err := d.updateClaimMetadata(r.Claim(), held)
		if d.failures.isDue("metadata "+r.Claim().UID, err, time.Now()) {
			d.options.Log.Warn("could not update the device metadata of a claim; retrying", "claim", r.String(), "error", err)
		}
	}
}

// updateClaimMetadata is a no-op if the files of a claim are up to date, or if it was prepared without files.
func (d *Driver) updateClaimMetadata(c poddevices.Claim, held []sriov.Holding) error {
	d.metadata.Lock()
	defer d.metadata.Unlock()
	files, _ := filepath.Glob(filepath.Join(d.options.metadataFolder(), c.Namespace+"_"+c.Name, "*", savedMetadata))
	var errs []error
	for _, path := range files {
		data, err := os.ReadFile(path)
		if ownerOf(data) == c.UID { // else another claim has this name
			err = writeMetadata(filepath.Join(filepath.Dir(path), metadataFile), withAttachments(data, c.UID, held))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// withAttachments returns the content of a metadata file with the attachments of its devices. Both versions have the same fields.
func withAttachments(data []byte, uid string, held []sriov.Holding) []byte {
	var out bytes.Buffer
	stream, encoder, changed := json.NewDecoder(bytes.NewReader(data)), json.NewEncoder(&out), false
	encoder.SetIndent("", "  ")
	for stream.More() {
		var m v1beta1.DeviceMetadata
		_ = stream.Decode(&m) // it is ours, and complete
		for i, dev := range m.Requests[0].Devices {
			now := networkData(holdingOf(held, uid, dev.Name))
			changed = changed || !equality.Semantic.DeepEqual(now, dev.NetworkData)
			m.Requests[0].Devices[i].NetworkData = now
		}
		m.Generation++
		_ = encoder.Encode(m)
	}
	if !changed {
		return data
	}
	return out.Bytes()
}

// ownerOf returns the UID of the claim whose metadata file has this content, or "".
func ownerOf(data []byte) string {
	var m v1beta1.DeviceMetadata
	_ = json.NewDecoder(bytes.NewReader(data)).Decode(&m)
	return string(m.UID)
}

// removeMetadata removes a CDI specification or a folder of metadata, unless its claim is among those given or has a record, which
// Prepare writes first.
func (d *Driver) removeMetadata(path string, notes ...claim.KubeletClaim) error {
	d.metadata.Lock()
	defer d.metadata.Unlock()
	var uids []string
	if spec, ok := strings.CutPrefix(filepath.Base(path), metadataPrefix); ok {
		uids = strings.Split(spec, "_")[:1]
	}
	files, _ := filepath.Glob(filepath.Join(path, "*", savedMetadata))
	for _, file := range files {
		data, _ := os.ReadFile(file)
		uids = append(uids, ownerOf(data))
	}
	for _, uid := range uids {
		_, err := claim.Read(d.options.Claims, uid)
		noted := slices.ContainsFunc(notes, func(n claim.KubeletClaim) bool { return n.UID == uid })
		if uid != "" && (noted || !errors.Is(err, fs.ErrNotExist)) {
			return nil
		}
	}
	return os.RemoveAll(path)
}

// removeStaleMetadata removes metadata that is older than orphanedAfter and whose claim has neither a record nor an entry in the
// kubelet's file. It may be left when the collector has unprepared a claim, or when its removal failed.
func (c *collector) removeStaleMetadata(notes []claim.KubeletClaim, now time.Time) error {
	folders, _ := filepath.Glob(filepath.Join(c.options.metadataFolder(), "*"))
	specs, _ := filepath.Glob(filepath.Join(c.options.CDI, metadataPrefix+"*"))
	var errs []error
	for _, path := range append(folders, specs...) {
		info, err := os.Stat(path)
		if err == nil && now.Sub(info.ModTime()) >= orphanedAfter {
			err = c.removeMetadata(path, notes...)
		}
		if !errors.Is(err, fs.ErrNotExist) { // Unprepare may be faster
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

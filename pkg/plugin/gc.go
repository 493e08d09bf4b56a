// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	validKey  = "cni.dev/valid-attachments"
	legacyKey = "cni.dev/attachments" // libcni sends it too

	// DeadKey is a Podlace-specific key of the configuration. The value of DeadKey is a list of attachments. If the configuration has
	// DeadKey, GC collects only attachments in this list. Container runtimes do not pass DeadKey. Podlace passes DeadKey when it calls GC
	// itself. The list of valid attachments may then lack attachments that were created after Podlace made the list. A container runtime
	// passes a complete list of valid attachments, as SPEC.md requires.
	DeadKey = "podlace/dead-attachments"

	// graceTime is the minimum age at which GC may collect an attachment whose namespace exists. graceTime protects attachments whose ADD
	// is still running. An ADD runs several plugins, and no lock is held between two plugins.
	graceTime = time.Second
)

// readValid reads the list of attachments that GC must keep. If the list is null or [], GC keeps no attachments. If the list is missing,
// readValid returns an error, because GC could otherwise delete attachments in use.
func (r *Request) readValid(data []byte) error {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(data, &keys); err != nil {
		return Errorf(CodeDecode, "network configuration: %w", describeDecodeError(err, nil))
	}
	list, ok := keys[validKey]
	if !ok {
		return Errorf(CodeConfig, "%s is missing: nothing is deleted", validKey)
	}
	var err error
	if r.Valid, err = attachmentSet(validKey, list, false); err != nil {
		return err
	}
	r.listed = len(r.Valid)
	if list, ok = keys[DeadKey]; ok {
		r.Dead, err = attachmentSet(DeadKey, list, true)
	}
	return err
}

// attachmentSet parses a list of attachments. If the last argument of attachmentSet is true, entries may lack the interface name, because
// leases in the old format do not contain this name.
func attachmentSet(key string, list []byte, bare bool) (map[Attachment]bool, error) {
	var entries []Attachment
	if err := json.Unmarshal(list, &entries); err != nil {
		return nil, Errorf(CodeDecode, "%s: %w", key, describeDecodeError(err, nil))
	}
	set := map[Attachment]bool{}
	for _, a := range entries {
		if a.ContainerID == "" || a.IfName == "" && !bare {
			return nil, Errorf(CodeConfig, "%s: an entry has no containerID or ifname", key)
		}
		set[a] = true
	}
	return set, nil
}

// Candidate reports whether an attachment may be stale. A stale attachment belongs to no existing pod. If Candidate returns true, GC calls
// Stale to examine the attachment further.
func (r *Request) Candidate(a Attachment) bool { return !r.Valid[a] && (r.Dead == nil || r.Dead[a]) }

// Stale reports whether GC may collect an attachment. The second argument of Stale is the path of the attachment's namespace, or "" if the
// path is unknown. The third argument of Stale is the time of the attachment's record. If Stale returns false for an attachment for which
// Candidate returns true, Stale adds the attachment to the field Valid.
func (r *Request) Stale(a Attachment, netns string, written time.Time) bool {
	if !r.Candidate(a) {
		return false
	}
	age, why := r.began.Sub(written), ""
	switch {
	case r.Dead != nil && NetnsExists(netns):
		why = "its namespace exists"
	case r.Dead == nil && age < graceTime && age > -time.Hour && !NetnsGone(netns): // a time in the future means that the clock was set back
		why = "it was made just now"
	}
	if why != "" {
		r.Log.Info("attachment is not in the list of valid ones; the next GC decides about it", "of", a.ContainerID, "ifname", a.IfName, "reason", why)
		r.KeepAttachment(a)
		return false
	}
	r.Log.Info("collecting attachment that is no longer valid", "of", a.ContainerID, "ifname", a.IfName)
	return true
}

// KeepAttachment adds an attachment to Valid, so that GC keeps it from then on. Use KeepAttachment if other stored state still uses the
// addresses of the attachment.
func (r *Request) KeepAttachment(a Attachment) { r.Valid[a] = true }

// ConfigForGC returns the configuration with which the plugin calls GC of a delegated plugin. The list of valid attachments in the returned
// configuration also contains the attachments that this GC kept.
func (r *Request) ConfigForGC() []byte {
	var keys map[string]json.RawMessage
	if len(r.Valid) == r.listed || json.Unmarshal(r.Config, &keys) != nil {
		return r.Config
	}
	list := make([]Attachment, 0, len(r.Valid))
	for a := range r.Valid {
		list = append(list, a)
	}
	valid, err := json.Marshal(list)
	keys[validKey], keys[legacyKey] = valid, valid
	config, err2 := json.Marshal(keys)
	if errors.Join(err, err2) != nil {
		return r.Config
	}
	return config
}

// ConfigForDel returns the configuration without the lists of attachments that only GC needs. GC calls DEL with the returned configuration
// for each stale attachment. With the lists of attachments, each DEL would be slow, because it would parse one entry for each pod of the
// node.
func (r *Request) ConfigForDel() []byte {
	var keys map[string]json.RawMessage
	if json.Unmarshal(r.Config, &keys) != nil {
		return r.Config
	}
	for _, key := range []string{validKey, legacyKey, DeadKey} {
		delete(keys, key)
	}
	config, err := json.Marshal(keys)
	if err != nil {
		return r.Config
	}
	return config
}

// NetnsGone reports whether the path of a network namespace certainly does not exist. NetnsGone returns false for "", which stands for an
// unknown path.
func NetnsGone(path string) bool {
	if path == "" {
		return false
	}
	_, err := os.Stat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// NetnsVisible reports whether this process can see the folder that contains a network namespace's path. In a container, the folder of the
// network namespaces may not be mounted. Without this folder, a missing path does not prove that the network namespace is gone. For paths
// below /proc, NetnsVisible always returns true, because the folder of a process disappears with the process. NetnsVisible returns true for
// "", which stands for an unknown path.
func NetnsVisible(path string) bool {
	folder := filepath.Dir(path)
	info, err := os.Stat(folder)
	return path == "" || strings.HasPrefix(folder, "/proc/") || err == nil && info.IsDir()
}

// NetnsExists reports whether a path is the path of a network namespace.
func NetnsExists(path string) bool {
	f, err := openNetns(path)
	if err == nil {
		f.Close()
	}
	return err == nil
}

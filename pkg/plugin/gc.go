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

	// DeadKey is our own key: the only attachments that GC may collect. A caller's list of valid attachments may lack attachments that were
	// made since. SPEC.md forbids that for a runtime. A caller that is no runtime names the dead attachments instead.
	DeadKey = "podlace/dead-attachments"

	// grace is the minimum age of an attachment for GC while its namespace exists. One ADD runs several plugins, and between two of them no
	// lock shows that it is running.
	grace = time.Second
)

// readValid reads the list of attachments to keep. null or [] keeps none. A missing list is an error, because it permits no deletion.
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
	if list, ok = keys[DeadKey]; ok {
		r.Dead, err = attachmentSet(DeadKey, list, true)
	}
	return err
}

// attachmentSet parses a list of attachments. A lease in the old format has no interface name; bare allows that.
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

// Candidate reports whether GC has to examine an attachment.
func (r *Request) Candidate(a Attachment) bool { return !r.Valid[a] && (r.Dead == nil || r.Dead[a]) }

// Stale reports whether GC may collect a candidate. netns is the namespace of its ADD, or "" if it is unknown; written is the time of its
// record. A spared attachment counts as valid from then on.
func (r *Request) Stale(a Attachment, netns string, written time.Time) bool {
	if !r.Candidate(a) {
		return false
	}
	age, why := r.began.Sub(written), ""
	switch {
	case r.Dead != nil && NetnsExists(netns):
		why = "its namespace exists"
	case r.Dead == nil && age < grace && age > -time.Hour && !NetnsGone(netns): // a time in the future means that the clock was set back
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

// KeepAttachment makes GC keep an attachment in its following steps, because other state still uses its addresses.
func (r *Request) KeepAttachment(a Attachment) { r.Valid[a], r.keptAny = true, true }

// ConfigForGC returns the configuration for a plugin to which GC is passed on. Its list of valid attachments includes the spared ones.
func (r *Request) ConfigForGC() []byte {
	var keys map[string]json.RawMessage
	if !r.keptAny || json.Unmarshal(r.Config, &keys) != nil {
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

// ConfigForDel returns the configuration without GC's lists. The configuration is parsed again for each removed attachment, and the lists
// have an entry per pod of the node.
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

// NetnsGone reports whether a namespace is certainly gone, by its path. For "", an unknown path, it returns false.
func NetnsGone(path string) bool {
	if path == "" {
		return false
	}
	_, err := os.Stat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// NetnsVisible reports whether this process sees the folder of a namespace. In a container, a folder that is not mounted proves nothing.
// The folder of /proc/PID/ns/net goes with the process. For "", an unknown path, it returns true.
func NetnsVisible(path string) bool {
	folder := filepath.Dir(path)
	info, err := os.Stat(folder)
	return path == "" || strings.HasPrefix(folder, "/proc/") || err == nil && info.IsDir()
}

// NetnsExists reports whether a path leads to a network namespace.
func NetnsExists(path string) bool {
	f, err := openNetns(path)
	if err == nil {
		f.Close()
	}
	return err == nil
}

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

	// DeadKey is a key of Podlace for GC calls of its own: the attachments to which GC is limited, because the list of valid ones may lack
	// some that were created since. Runtimes pass no DeadKey, but a complete list, as SPEC.md requires.
	DeadKey = "podlace/dead-attachments"

	// graceTime is the minimum age at which GC may collect an attachment whose namespace exists. Its ADD may still be running, and holds no
	// lock between two plugins.
	graceTime = time.Second
)

// readValid reads the list of attachments that GC must keep: none if it is null or []. A missing list is an error, because GC could
// otherwise delete attachments in use.
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

// attachmentSet parses a list of attachments. With bare, entries may lack the interface name, which leases in the old format do not
// contain.
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

// Candidate reports whether an attachment may be stale, which means that its pod is gone. Stale then examines it further.
func (r *Request) Candidate(a Attachment) bool { return !r.Valid[a] && (r.Dead == nil || r.Dead[a]) }

// Stale reports whether GC may collect an attachment. netns is the path of its namespace, or "" if unknown, and written the time of its
// record. A candidate that is not stale is added to Valid.
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

// KeepAttachment adds an attachment to Valid, because other stored state still uses its addresses.
func (r *Request) KeepAttachment(a Attachment) { r.Valid[a] = true }

// ConfigForGC returns the configuration for GC of a delegated plugin. Its valid attachments include those that this GC kept.
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

// ConfigForDel returns the configuration for the DEL that GC calls for each stale attachment. It lacks GC's lists, with an entry for each
// pod of the node, which would make every DEL slow.
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

// NetnsGone reports whether the path of a network namespace certainly does not exist. It returns false for "", an unknown path.
func NetnsGone(path string) bool {
	if path == "" {
		return false
	}
	_, err := os.Stat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// NetnsVisible reports whether this process can see the folder of a namespace's path, without which a missing path does not prove that the
// namespace is gone: a container may lack the mount. It returns true for "", an unknown path, and below /proc, because a process takes its
// folder with it, unless a container has its own processes, the first of which have no parent.
func NetnsVisible(path string) bool {
	folder := filepath.Dir(path)
	info, err := os.Stat(folder)
	return path == "" || strings.HasPrefix(folder, "/proc/") && os.Getppid() != 0 || err == nil && info.IsDir()
}

// NetnsEnded reports whether a namespace is gone, and not only outside what this container sees.
func NetnsEnded(path string) bool { return NetnsGone(path) && NetnsVisible(path) }

// NetnsExists reports whether a path is that of a network namespace.
func NetnsExists(path string) bool {
	f, err := openNetns(path)
	if err == nil {
		f.Close()
	}
	return err == nil
}

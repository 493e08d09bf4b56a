// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/version"
)

// checkTimeout is the timeout of one plugin's CHECK.
const checkTimeout = 10 * time.Second

// FailedCheck is an attachment whose CHECK failed.
type FailedCheck struct {
	*Attachment
	Plugin string
	Err    error
}

// The type "added" contains the data of an ADD. This data comes from the cache of libcni.
type added struct {
	cachedResult
	Config       []byte                     `json:"config"`
	Capabilities map[string]json.RawMessage `json:"capabilityArgs"`
	Result       json.RawMessage            `json:"result"`
	version      string                     // cniVersion of the result
}

// CheckAll calls CHECK of Podlace's plugins for each live attachment in libcni's cache, as a runtime does. When the time in the argument
// "budget" has passed, CheckAll does not start another CHECK. CheckAll also returns the number of attachments for which CHECK ran, and the
// number of attachments that were not checked.
func CheckAll(list []*Attachment, binDir string, budget time.Duration) (checked, left int, failed []FailedCheck) {
	ours := map[string]bool{}
	isOurs := func(name string) bool {
		known, ok := ours[name]
		if !ok {
			_, err := Version(filepath.Join(binDir, name))
			known, ours[name] = err == nil, err == nil
		}
		return known
	}
	for start := time.Now(); len(list) > 0 && time.Since(start) < budget; list = list[1:] {
		a := list[0]
		add, plugins := readADD(a)
		if a.State != Alive || add == nil {
			continue
		}
		checked++
		for _, raw := range plugins {
			name, config, err := add.input(raw)
			if err != nil || !isOurs(name) {
				continue
			}
			if err := callPlugin("CHECK", binDir, name, config, checkTimeout, add.env()...); err != nil {
				failed = append(failed, FailedCheck{a, name, err})
				break // as libcni does
			}
		}
	}
	for _, a := range list {
		if add, _ := readADD(a); a.State == Alive && add != nil {
			left++
		}
	}
	return checked, left, failed
}

// readADD reads the data of an attachment's ADD from the cache of libcni. If the cache of libcni does not contain the ADD, or if the
// runtime does not call CHECK, readADD returns nil.
func readADD(a *Attachment) (*added, []json.RawMessage) {
	var add added
	var list struct {
		DisableCheck bool              `json:"disableCheck"`
		Plugins      []json.RawMessage `json:"plugins"`
	}
	var result struct {
		CNIVersion string `json:"cniVersion"`
	}
	data, err := readRegular(cachePath(a.Network, a.ContainerID, a.IfName), maxCached)
	if err != nil || json.Unmarshal(data, &add) != nil || add.Kind != "cniCacheV1" || add.Network != a.Network ||
		json.Unmarshal(add.Config, &list) != nil || list.DisableCheck || json.Unmarshal(add.Result, &result) != nil {
		return nil, nil
	}
	if ok, err := version.GreaterThanOrEqualTo(result.CNIVersion, "0.4.0"); !ok || err != nil { // older versions have no CHECK
		return nil, nil
	}
	add.version = result.CNIVersion
	return &add, list.Plugins
}

// The method input() returns the type of a plugin and the configuration that the runtime passes to this plugin.
func (a *added) input(raw json.RawMessage) (name string, config []byte, err error) {
	var p struct {
		Type         string          `json:"type"`
		Capabilities map[string]bool `json:"capabilities"`
	}
	if err := json.Unmarshal(raw, &p); err != nil {
		return "", nil, err
	}
	more := map[string]any{"name": a.Network, "cniVersion": a.version, "prevResult": a.Result}
	runtime := map[string]json.RawMessage{}
	for key, value := range a.Capabilities {
		if p.Capabilities[key] {
			runtime[key] = value
		}
	}
	if len(runtime) > 0 {
		more["runtimeConfig"] = runtime
	}
	config, err = inject(raw, more)
	return filepath.Base(p.Type), config, err
}

// The method env() returns the CNI variables of the attachment.
func (a *added) env() []string {
	var args []string
	for _, kv := range a.Args {
		args = append(args, kv[0]+"="+kv[1])
	}
	return []string{"CNI_CONTAINERID=" + a.ContainerID, "CNI_NETNS=" + a.Netns, "CNI_IFNAME=" + a.IfName,
		"CNI_ARGS=" + strings.Join(args, ";")}
}

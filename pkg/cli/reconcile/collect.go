// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/plugin"
)

// gcTimeout bounds one plugin's GC, which runs DEL for each dead attachment.
const gcTimeout = 10 * time.Minute

// Plan holds the plugins whose GC is called for a network.
type Plan struct {
	Network Network
	Run     []Plugin
	Notes   []string // excluded plugins, with the reasons
	binDir  string
}

// NewPlan finds the plugins of a network whose GC to call. Other projects' are excluded, because their GC would also remove a pod that was
// added after the list of attachments was made; Podlace's plugins get a list of the dead attachments and remove only these. The plan
// includes host-local if another project's main plugin uses it, and each plugin with state of dead attachments, even if no configuration
// names it.
func NewPlan(n Network, list []*Attachment, binDir string) Plan {
	plan := Plan{Network: n, binDir: binDir}
	if n.DisableGC {
		plan.Notes = []string{n.File + ": disableGC is set: left alone"}
		return plan
	}
	for _, p := range n.Plugins {
		err := plan.add(p)
		if err != nil && plugin.Kind(p.IPAM) == hostLocal && plan.add(Plugin{Type: p.IPAM, raw: p.raw}) == nil {
			err = fmt.Errorf("%w; its addresses are host-local's, which runs", err)
		}
		plan.note(p.Type, err)
	}
	for _, a := range Dead(list) {
		for _, holder := range a.Holders {
			if a.Network == n.Name && !plan.covers(holder) {
				plan.note(holder, plan.addHolder(holder))
			}
		}
	}
	return plan
}

const hostLocal = "host-local"

func (p *Plan) add(pl Plugin) error {
	if pl.Type != filepath.Base(pl.Type) {
		return errors.New("it is not a plugin name")
	}
	_, err := Version(filepath.Join(p.binDir, pl.Type))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: --bin-dir names the folder with the plugins", err)
	}
	if err == nil {
		p.Run = append(p.Run, pl)
	}
	return err
}

// addHolder adds a plugin that no configuration names, under its installed name, or podlace-pod in its place.
func (p *Plan) addHolder(kind string) error {
	names := []string{plugin.ClusterPrefix + kind, kind}
	if kind == hostLocal || plugin.Runs(plugin.PodType, kind) {
		names = append(names, plugin.PodType)
	}
	var missing error
	for _, name := range names {
		pl := Plugin{Type: name, raw: json.RawMessage(`{"ipam":{"type":"` + hostLocal + `"}}`)}
		if plugin.Runs(name, "bridge") {
			pl.IPAM = hostLocal
		}
		switch err := p.add(pl); {
		case err == nil:
			return nil
		case name == kind:
			missing = err
		}
	}
	return missing
}

func (p *Plan) note(name string, err error) {
	if err != nil {
		p.Notes = append(p.Notes, fmt.Sprintf("network %s: %s is left alone: %v", p.Network.Name, name, err))
	}
}

// covers reports whether a plugin is in the plan or in the network's configuration, also as one that another plugin runs.
func (p *Plan) covers(kind string) bool {
	return slices.ContainsFunc(slices.Concat(p.Run, p.Network.Plugins), func(pl Plugin) bool { return pl.has(kind) })
}

// Collect calls GC of the plugins, which removes the network's dead attachments, and continues if one fails. An attachment that is missing
// from list is never removed.
func (p Plan) Collect(list []*Attachment) error {
	kept, err := p.removeUnrecorded(list)
	if err != nil && kept == nil { // it is unknown which attachments to keep
		return err
	}
	errs := []error{err}
	valid, dead := p.lists(list, kept)
	if len(dead) == 0 {
		return err
	}
	for _, pl := range p.Run {
		if err := p.gc(pl, valid, dead); err != nil {
			errs = append(errs, fmt.Errorf("network %s: %s: %w", p.Network.Name, pl.Type, err))
		}
	}
	return errors.Join(errs...)
}

func (p Plan) lists(list []*Attachment, kept map[*Attachment]bool) (valid, dead []plugin.Attachment) {
	valid = []plugin.Attachment{}
	known := map[plugin.Attachment]bool{}
	for _, a := range list {
		of := plugin.Attachment{ContainerID: a.ContainerID, IfName: a.IfName}
		if a.Network != p.Network.Name {
			continue
		}
		known[of] = true
		if a.Dead != "" && !kept[a] {
			dead = append(dead, of)
		} else {
			if of.IfName == "" { // the specification requires a name, and any name matches a lease in the old format
				of.IfName = "eth0"
			}
			valid = append(valid, of)
		}
	}
	for _, c := range readCache() {
		if of := (plugin.Attachment{ContainerID: c.ContainerID, IfName: c.IfName}); c.Network == p.Network.Name && !known[of] {
			valid = append(valid, of)
		}
	}
	return valid, dead
}

// gc calls GC as libcni does. It passes the valid attachments under two keys, because both are in use.
func (p Plan) gc(pl Plugin, valid, dead []plugin.Attachment) error {
	config, err := inject(pl.raw, map[string]any{"name": p.Network.Name, "cniVersion": p.Network.gcVersion(),
		"cni.dev/valid-attachments": valid, "cni.dev/attachments": valid, plugin.DeadKey: dead})
	if err != nil {
		return err
	}
	return callPlugin("GC", p.binDir, pl.Type, config, gcTimeout)
}

func inject(raw json.RawMessage, more map[string]any) ([]byte, error) {
	keys := map[string]json.RawMessage{}
	if err := json.Unmarshal(raw, &keys); err != nil {
		return nil, err
	}
	for k, v := range more {
		data, err := json.Marshal(v)
		if err != nil {
			return nil, err
		}
		keys[k] = data
	}
	return json.Marshal(keys)
}

// Compare marks each dead attachment of before that after lacks as removed, and returns the number of those that remain.
func Compare(before, after []*Attachment) (left int) {
	still := map[attachment.Key]bool{}
	for _, a := range after {
		still[a.Key()] = true
	}
	for _, a := range Dead(before) {
		removed := !still[a.Key()]
		a.Removed = &removed
		if !removed {
			left++
		}
	}
	return left
}

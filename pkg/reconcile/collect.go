// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/child"
	"github.com/podlace/podlace/pkg/plugin"
)

const (
	// gcTimeout is the timeout of one plugin's GC, which runs a DEL per dead attachment.
	gcTimeout = 10 * time.Minute
	// bannerTimeout is the timeout for asking a program whether it is one of Podlace's plugins.
	bannerTimeout = 10 * time.Second
)

// Plan lists the plugins that run GC for a network.
type Plan struct {
	Network Network
	Run     []Plugin
	Notes   []string // excluded plugins, with the reasons
	binDir  string
}

// NewPlan finds Podlace's plugins of a network. Other plugins do not run: their GC would remove a pod that was added after the list was
// made. Podlace's plugins do not, because the list names the dead attachments. If an external main plugin uses our host-local, host-local
// runs. A plugin with state of dead attachments also runs if no configuration names it.
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
	err := checkIsPodlace(filepath.Join(p.binDir, pl.Type))
	if err == nil {
		p.Run = append(p.Run, pl)
	}
	return err
}

// addHolder adds a plugin that no configuration names, under its installed name.
func (p *Plan) addHolder(kind string) error {
	raw := json.RawMessage(`{"ipam":{"type":"` + hostLocal + `"}}`)
	if p.add(Plugin{Type: plugin.ClusterPrefix + kind, raw: raw}) == nil {
		return nil
	}
	return p.add(Plugin{Type: kind, raw: raw})
}

func (p *Plan) note(name string, err error) {
	if err != nil {
		p.Notes = append(p.Notes, fmt.Sprintf("network %s: %s is left alone: %v", p.Network.Name, name, err))
	}
}

// covers reports whether a plugin runs, itself or for another plugin, or is in the configuration.
func (p *Plan) covers(kind string) bool {
	same := func(pl Plugin) bool { return plugin.Kind(pl.Type) == kind || plugin.Kind(pl.IPAM) == kind }
	return slices.ContainsFunc(p.Run, same) || slices.ContainsFunc(p.Network.Plugins, same)
}

// checkIsPodlace returns an error if a program is no plugin of Podlace. Podlace's plugins print their name when started without a verb.
func checkIsPodlace(path string) error {
	if _, err := os.Stat(path); err != nil {
		return err
	}
	var stderr child.Buffer
	cmd := exec.Command(path)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	cmd.Stderr = &stderr
	if err := child.Run(cmd, bannerTimeout, nil); err != nil || !strings.Contains(stderr.String(), "plugin of Podlace") {
		return errors.New("it is not Podlace's")
	}
	return nil
}

// Collect makes the plugins remove the network's dead attachments. It continues after errors. It touches no attachment outside the list:
// the list of valid attachments contains all others, and the list of dead ones excludes any further attachment.
func (p Plan) Collect(list []*Attachment) error {
	valid, dead := p.lists(list)
	if len(dead) == 0 {
		return nil
	}
	var errs []error
	for _, pl := range p.Run {
		if err := p.gc(pl, valid, dead); err != nil {
			errs = append(errs, fmt.Errorf("network %s: %s: %w", p.Network.Name, pl.Type, err))
		}
	}
	return errors.Join(errs...)
}

func (p Plan) lists(list []*Attachment) (valid, dead []plugin.Attachment) {
	valid = []plugin.Attachment{}
	known := map[plugin.Attachment]bool{}
	for _, a := range list {
		of := a.of()
		if a.Network != p.Network.Name {
			continue
		}
		known[of] = true
		switch {
		case a.Dead != "":
			dead = append(dead, of)
		default:
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

// gc calls GC as libcni does, with both keys for the list of valid attachments.
func (p Plan) gc(pl Plugin, valid, dead []plugin.Attachment) error {
	config, err := inject(pl.raw, map[string]any{"name": p.Network.Name, "cniVersion": p.Network.gcVersion(),
		"cni.dev/valid-attachments": valid, "cni.dev/attachments": valid, plugin.DeadKey: dead})
	if err != nil {
		return err
	}
	var stdout, stderr child.Buffer
	cmd := exec.Command(filepath.Join(p.binDir, pl.Type))
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "CNI_COMMAND=GC", "CNI_PATH=" + p.binDir}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(config), &stdout, &stderr
	err = child.Run(cmd, gcTimeout, nil)
	if err == nil {
		return nil
	}
	var failure struct {
		Code    uint   `json:"code"`
		Msg     string `json:"msg"`
		Details string `json:"details"`
	}
	if json.Unmarshal(stdout.Bytes(), &failure) != nil || failure.Msg == "" {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return fmt.Errorf("code %d: %s", failure.Code, failure.Msg)
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

// Compare marks the dead attachments that are no longer recorded, and counts the remaining ones.
func Compare(before, after []*Attachment) (left int) {
	still := map[key]bool{}
	for _, a := range after {
		still[key{a.Network, a.of()}] = true
	}
	for _, a := range Dead(before) {
		removed := !still[key{a.Network, a.of()}]
		a.Removed = &removed
		if !removed {
			left++
		}
	}
	return left
}

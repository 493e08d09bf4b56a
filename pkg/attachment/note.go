// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Note leaves a mark with a text that holds for the whole network.
func (a *Attachment) Note(mark, text string) error {
	return a.dir.Overwrite("."+mark, []byte(text), 0o600)
}

// Noted returns the text of the network's mark; ok is false when it has none.
func (a *Attachment) Noted(mark string) (text string, ok bool) {
	data, err := a.dir.Read("." + mark)
	return string(data), err == nil
}

// Notes returns the network's marks that begin with a prefix.
func (a *Attachment) Notes(prefix string) (marks []string, err error) {
	names, err := a.dir.List()
	for _, name := range names {
		if mark, ok := strings.CutPrefix(name, "."); ok && strings.HasPrefix(mark, prefix) {
			marks = append(marks, mark)
		}
	}
	return marks, err
}

// Unnote removes the mark.
func (a *Attachment) Unnote(mark string) error { return a.dir.Remove("." + mark) }

// NotedIn returns the text of a network's mark without its lock; ok is false when it has none.
func NotedIn(network, mark string) (text string, ok bool) {
	data, err := store.ReadFile(filepath.Join(folder(network), "."+mark))
	return string(data), err == nil
}

// NotedBy returns a network that has a mark.
func NotedBy(mark string) (network string, ok bool, err error) {
	networks, err := Networks()
	for _, network := range networks {
		if _, err := os.Lstat(filepath.Join(folder(network), "."+mark)); err == nil {
			return network, true, nil
		}
	}
	return "", false, err
}

// NotedAs reports whether any network has a mark with that text.
func NotedAs(mark, text string) (bool, error) {
	networks, err := Networks()
	return slices.ContainsFunc(networks, func(network string) bool {
		data, err := store.ReadFile(filepath.Join(folder(network), "."+mark))
		return err == nil && string(data) == text
	}), err
}

// UnnoteAll removes the mark of every network that has it.
func UnnoteAll(mark string) error {
	networks, err := Networks()
	for _, network := range networks {
		err = errors.Join(err, forget(network, "."+mark))
	}
	return err
}

// NoteNode leaves a mark with a text that holds for the node, beside those of the networks.
func NoteNode(mark, text string) error {
	dir, err := store.Make(store.Root, 0o700)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Overwrite("."+mark, []byte(text), 0o600)
}

// NodeNoted returns the text of the node's mark; ok is false when it has none.
func NodeNoted(mark string) (text string, ok bool) {
	data, err := store.ReadFile(filepath.Join(store.Root, "."+mark))
	return string(data), err == nil
}

// UnnoteNode removes the node's mark.
func UnnoteNode(mark string) error {
	dir, err := store.Open(store.Root)
	if err != nil {
		return ignoreMissing(err)
	}
	defer dir.Close()
	return dir.Remove("." + mark)
}

// Changed notes a text under a mark of the node, and reports whether it is another than the one before. No text is the same as no mark.
// Each verb is a process of its own, and logs by this what lasts: once.
func Changed(mark, text string) bool {
	if before, _ := NodeNoted(mark); before == text {
		return false
	}
	if text == "" {
		_ = UnnoteNode(mark) // while it stays, each call reports the change again
	} else {
		_ = NoteNode(mark, text)
	}
	return true
}

// LogOnce logs the findings in the configuration of the plugin of r: once, until they change or the node boots.
func LogOnce(r *plugin.Request, findings []plugin.Finding) {
	text := ""
	if len(findings) > 0 {
		text = fmt.Sprint(findings)
	}
	if Changed("found-"+r.Plugin+"-"+r.Network, text) {
		r.LogFindings(findings)
	}
}

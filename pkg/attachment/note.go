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

// Note writes a note with a text for the whole network.
func (a *Attachment) Note(mark, text string) error {
	return a.dir.Overwrite("."+mark, []byte(text), 0o600)
}

// Noted returns the text of the network's note. ok is false if there is none.
func (a *Attachment) Noted(mark string) (text string, ok bool) {
	data, err := a.dir.Read("." + mark)
	return string(data), err == nil
}

// Notes returns the network's notes that begin with a prefix.
func (a *Attachment) Notes(prefix string) (marks []string, err error) {
	names, err := a.dir.List()
	for _, name := range names {
		if mark, ok := strings.CutPrefix(name, "."); ok && strings.HasPrefix(mark, prefix) {
			marks = append(marks, mark)
		}
	}
	return marks, err
}

// Unnote removes the note.
func (a *Attachment) Unnote(mark string) error { return a.dir.Remove("." + mark) }

// NotedIn returns the text of a network's note without taking the lock. ok is false if there is none.
func NotedIn(network, mark string) (text string, ok bool) {
	data, err := store.ReadFile(filepath.Join(folder(network), "."+mark))
	return string(data), err == nil
}

// NotedBy returns a network with a note.
func NotedBy(mark string) (network string, ok bool, err error) {
	networks, err := Networks()
	for _, network := range networks {
		if _, err := os.Lstat(filepath.Join(folder(network), "."+mark)); err == nil {
			return network, true, nil
		}
	}
	return "", false, err
}

// NotedAs reports whether any network has a note with this text.
func NotedAs(mark, text string) (bool, error) {
	networks, err := Networks()
	return slices.ContainsFunc(networks, func(network string) bool {
		data, err := store.ReadFile(filepath.Join(folder(network), "."+mark))
		return err == nil && string(data) == text
	}), err
}

// UnnoteAll removes the note from all networks.
func UnnoteAll(mark string) error {
	networks, err := Networks()
	for _, network := range networks {
		err = errors.Join(err, forget(network, "."+mark))
	}
	return err
}

// NoteNode writes a note with a text for the node, beside the notes of networks.
func NoteNode(mark, text string) error {
	dir, err := store.Make(store.Root, 0o700)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Overwrite("."+mark, []byte(text), 0o600)
}

// NodeNoted returns the text of the node's note. ok is false if there is none.
func NodeNoted(mark string) (text string, ok bool) {
	data, err := store.ReadFile(filepath.Join(store.Root, "."+mark))
	return string(data), err == nil
}

// UnnoteNode removes the node's note.
func UnnoteNode(mark string) error {
	dir, err := store.Open(store.Root)
	if err != nil {
		return ignoreMissing(err)
	}
	defer dir.Close()
	return dir.Remove("." + mark)
}

// Changed stores a text in a note of the node, and reports whether the text differs from the previous one. An empty text stands for no
// note. Each verb is a separate process; with Changed it logs a lasting condition only once.
func Changed(mark, text string) bool {
	if before, _ := NodeNoted(mark); before == text {
		return false
	}
	if text == "" {
		_ = UnnoteNode(mark) // while the note stays, each call reports the change again
	} else {
		_ = NoteNode(mark, text)
	}
	return true
}

// LogOnce logs the findings about the configuration of r's plugin once, until they change or the node boots.
func LogOnce(r *plugin.Request, findings []plugin.Finding) {
	text := ""
	if len(findings) > 0 {
		text = fmt.Sprint(findings)
	}
	if Changed("found-"+r.Plugin+"-"+r.Network, text) {
		r.LogFindings(findings)
	}
}

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

// Note writes a note for the whole network: a file with a mark as its name and a text as its content.
func (a *Attachment) Note(mark, text string) error {
	return a.dir.Overwrite("."+mark, []byte(text), 0o600)
}

// Noted returns the text of the network's note that has the given mark. The second result is false if there is no note with this mark.
func (a *Attachment) Noted(mark string) (text string, ok bool) {
	data, err := a.dir.Read("." + mark)
	return string(data), err == nil
}

// Notes returns those marks of the network's notes that begin with a prefix.
func (a *Attachment) Notes(prefix string) (marks []string, err error) {
	names, err := a.dir.List()
	for _, name := range names {
		if mark, ok := strings.CutPrefix(name, "."); ok && strings.HasPrefix(mark, prefix) {
			marks = append(marks, mark)
		}
	}
	return marks, err
}

// Unnote removes the network's note with the mark.
func (a *Attachment) Unnote(mark string) error { return a.dir.Remove("." + mark) }

// NotedIn returns the text of a network's note without taking the network's lock. The second result is false if there is no note with this
// mark.
func NotedIn(network, mark string) (text string, ok bool) {
	data, err := store.ReadFile(filepath.Join(folder(network), "."+mark))
	return string(data), err == nil
}

// NotedBy returns the name of a network that has a note with the mark. If several networks have this note, the choice is arbitrary.
func NotedBy(mark string) (network string, ok bool, err error) {
	networks, err := Networks()
	for _, network := range networks {
		if _, err := os.Lstat(filepath.Join(folder(network), "."+mark)); err == nil {
			return network, true, nil
		}
	}
	return "", false, err
}

// NotedAs reports whether any network has a note with this mark and this text.
func NotedAs(mark, text string) (bool, error) {
	networks, err := Networks()
	return slices.ContainsFunc(networks, func(network string) bool {
		data, err := store.ReadFile(filepath.Join(folder(network), "."+mark))
		return err == nil && string(data) == text
	}), err
}

// UnnoteAll removes the notes with the mark from all networks.
func UnnoteAll(mark string) error {
	networks, err := Networks()
	for _, network := range networks {
		err = errors.Join(err, forget(network, "."+mark))
	}
	return err
}

// NoteNode writes a note for the node. The note is a file beside the folders of the networks.
func NoteNode(mark, text string) error {
	dir, err := store.Make(store.Root, 0o700)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Overwrite("."+mark, []byte(text), 0o600)
}

// NodeNoted returns the text of the node's note with the mark. The second result is false if there is no note with this mark.
func NodeNoted(mark string) (text string, ok bool) {
	data, err := store.ReadFile(filepath.Join(store.Root, "."+mark))
	return string(data), err == nil
}

// UnnoteNode removes the node's note with the mark.
func UnnoteNode(mark string) error {
	dir, err := store.Open(store.Root)
	if err != nil {
		return ignoreMissing(err)
	}
	defer dir.Close()
	return dir.Remove("." + mark)
}

// Changed saves a text as a note of the node, and reports whether the text differs from the previous text of the note. An empty text
// removes the note. Each verb runs in a separate process. The note lets these processes log a lasting condition only once.
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

// LogOnce logs the findings about the configuration of r's plugin. Unchanged findings are logged again only after the node's next boot.
func LogOnce(r *plugin.Request, findings []plugin.Finding) {
	text := ""
	if len(findings) > 0 {
		text = fmt.Sprint(findings)
	}
	if Changed("found-"+r.Plugin+"-"+r.Network, text) {
		r.LogFindings(findings)
	}
}

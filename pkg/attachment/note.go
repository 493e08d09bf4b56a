// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// OfNode stands in place of a network's name for notes of the node. They are in the folder that contains the folders of the networks.
const OfNode = ""

// WriteNote writes a note of the network, a small file that stores one fact. Its name is given without the leading dot.
func WriteNote(network, name, text string) error {
	dir, err := store.Make(folder(network), 0o700)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Overwrite("."+name, []byte(text), 0o600)
}

// ReadNote returns the text of a network's note. ok is false if it does not exist.
func ReadNote(network, name string) (text string, ok bool) {
	dir, err := store.Open(folder(network))
	if err != nil {
		return "", false
	}
	defer dir.Close()
	data, err := dir.Read("." + name)
	return string(data), err == nil
}

// RemoveNote removes a network's note.
func RemoveNote(network, name string) error { return ignoreMissing(removeFile(network, "."+name)) }

// ListNotes returns the names of the network's notes that begin with a prefix.
func ListNotes(network, prefix string) (notes []string) {
	files, _ := store.Names(folder(network), 0)
	for _, file := range files {
		if name, ok := strings.CutPrefix(file, "."); ok && strings.HasPrefix(name, prefix) {
			notes = append(notes, name)
		}
	}
	return notes
}

// NetworkWithNote returns a network that has a note with this name, any one of several.
func NetworkWithNote(name string) (network string, ok bool, err error) {
	networks, err := Networks()
	for _, network := range networks {
		if _, err := os.Lstat(filepath.Join(folder(network), "."+name)); err == nil {
			return network, true, nil
		}
	}
	return "", false, err
}

// RemoveNotes removes the notes with this name from all networks.
func RemoveNotes(name string) error {
	networks, err := Networks()
	for _, network := range networks {
		err = errors.Join(err, RemoveNote(network, name))
	}
	return err
}

// Changed reports whether the text of a lasting problem of the request's plugin and network differs from the previous call. It is empty
// while there is no problem. Each verb runs in its own process, so a note of the node keeps what an earlier one logged.
func Changed(r *plugin.Request, problem, text string) bool {
	name := "logged-" + problem + "-" + r.Plugin + "-" + r.Network
	if before, _ := ReadNote(OfNode, name); before == text {
		return false
	}
	if text == "" {
		_ = RemoveNote(OfNode, name) // while the note file exists, each call reports the change again
	} else {
		_ = WriteNote(OfNode, name, text)
	}
	return true
}

// LogOnce logs findings about the request's configuration. Unchanged ones are logged again only after the node's next boot.
func LogOnce(r *plugin.Request, findings []plugin.Finding) {
	text := ""
	if len(findings) > 0 {
		text = fmt.Sprint(findings)
	}
	if Changed(r, "found", text) {
		r.LogFindings(findings)
	}
}

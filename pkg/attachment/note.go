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

// WriteNote writes a note file of the network. A note file is a small file that stores one fact. The argument `name` is the file's name
// without the leading dot.
func (a *Attachment) WriteNote(name, text string) error {
	return a.dir.Overwrite("."+name, []byte(text), 0o600)
}

// ReadNote returns the text of the network's note file with the given name. The second result is false if this file does not exist.
func (a *Attachment) ReadNote(name string) (text string, ok bool) {
	data, err := a.dir.Read("." + name)
	return string(data), err == nil
}

// ListNotes returns the names of the network's note files that begin with a prefix.
func (a *Attachment) ListNotes(prefix string) (notes []string, err error) {
	files, err := a.dir.List()
	for _, file := range files {
		if name, ok := strings.CutPrefix(file, "."); ok && strings.HasPrefix(name, prefix) {
			notes = append(notes, name)
		}
	}
	return notes, err
}

// RemoveNote removes the network's note file with the given name.
func (a *Attachment) RemoveNote(name string) error { return a.dir.Remove("." + name) }

// ReadNote returns the text of a network's note file without taking the network's lock. The second result is false if the file does not
// exist.
func ReadNote(network, name string) (text string, ok bool) {
	data, err := store.ReadFile(filepath.Join(folder(network), "."+name))
	return string(data), err == nil
}

// NetworkWithNote returns the name of a network that has a note file with the given name. If several networks have such a note file,
// NetworkWithNote returns any of these networks.
func NetworkWithNote(name string) (network string, ok bool, err error) {
	networks, err := Networks()
	for _, network := range networks {
		if _, err := os.Lstat(filepath.Join(folder(network), "."+name)); err == nil {
			return network, true, nil
		}
	}
	return "", false, err
}

// RemoveNotes removes the note files with the given name from all networks.
func RemoveNotes(name string) error {
	networks, err := Networks()
	for _, network := range networks {
		err = errors.Join(err, removeFile(network, "."+name))
	}
	return err
}

// WriteNodeNote writes a note file for the node. The note file is in the folder that contains the folders of the networks.
func WriteNodeNote(name, text string) error {
	dir, err := store.Make(store.Root, 0o700)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Overwrite("."+name, []byte(text), 0o600)
}

// ReadNodeNote returns the text of the node's note file with the given name. The second result is false if this file does not exist.
func ReadNodeNote(name string) (text string, ok bool) {
	data, err := store.ReadFile(filepath.Join(store.Root, "."+name))
	return string(data), err == nil
}

// RemoveNodeNote removes the node's note file with the given name.
func RemoveNodeNote(name string) error {
	dir, err := store.Open(store.Root)
	if err != nil {
		return ignoreMissing(err)
	}
	defer dir.Close()
	return dir.Remove("." + name)
}

// Changed reports whether the text of a lasting problem of the plugin and network of r differs from the text at the previous call. The text
// is empty while there is no problem. Each verb runs in a separate process, so only a note file of the node shows what an earlier process
// has logged.
func Changed(r *plugin.Request, problem, text string) bool {
	name := "logged-" + problem + "-" + r.Plugin + "-" + r.Network
	if before, _ := ReadNodeNote(name); before == text {
		return false
	}
	if text == "" {
		_ = RemoveNodeNote(name) // while the note file exists, each call reports the change again
	} else {
		_ = WriteNodeNote(name, text)
	}
	return true
}

// LogOnce logs the findings about the configuration of the request r. Unchanged findings are logged again only after the node's next boot.
func LogOnce(r *plugin.Request, findings []plugin.Finding) {
	text := ""
	if len(findings) > 0 {
		text = fmt.Sprint(findings)
	}
	if Changed(r, "found", text) {
		r.LogFindings(findings)
	}
}

// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"path/filepath"
	"strings"
)

// Damaged is a file that stands for an attachment and is not a record of this format.
type Damaged struct {
	Network string
	Name    string // of the file
	Reason  error
}

// Path returns the file.
func (d Damaged) Path() string { return filepath.Join(folder(d.Network), d.Name) }

// Plugin returns the plugin whose record it should be.
func (d Damaged) Plugin() string {
	plugin, _, _ := strings.Cut(d.Name, "-")
	return plugin
}

// Of reports whether the file stands for the attachment with the key.
func (d Damaged) Of(k Key) bool { return d.Network == k.Network && d.Name == d.Plugin()+"-"+k.Hash() }

// Unreadable returns the files of the node that stand for attachments and are not records of this format.
func Unreadable() (damaged []Damaged, err error) {
	_, damaged, err = readAll()
	return damaged, err
}

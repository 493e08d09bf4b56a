// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"path/filepath"
	"strings"
)

// Damaged is an unreadable record file: its name is that of a record, but its content is not a record in the current format.
type Damaged struct {
	Network string
	Name    string // name of the file
	Reason  error
}

// Path returns the path of the file.
func (d Damaged) Path() string { return filepath.Join(folder(d.Network), d.Name) }

// Plugin returns the plugin's name, which is the first part of the file name.
func (d Damaged) Plugin() string {
	plugin, _, _ := strings.Cut(d.Name, "-")
	return plugin
}

// Of reports whether the file belongs to the attachment with this key.
func (d Damaged) Of(k Key) bool { return d.Network == k.Network && d.Name == d.Plugin()+"-"+k.Hash() }

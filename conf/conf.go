// SPDX-License-Identifier: Apache-2.0

// Package conf holds the configurations that Podlace ships, as files to copy
// and as data for the commands that run them.
package conf

import (
	"embed"
	"fmt"
)

// Default is the name of the configuration that suits most nodes.
const Default = "10-podlace.conflist"

//go:embed *.conflist
var files embed.FS

// Conflist returns a shipped configuration by its file name.
func Conflist(name string) ([]byte, error) {
	data, err := files.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("no such shipped configuration: %w", err)
	}
	return data, nil
}

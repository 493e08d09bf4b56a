// SPDX-License-Identifier: Apache-2.0

// Package conf embeds the configurations that Podlace ships, for its commands. Admins copy the same files to a node.
package conf

import (
	"embed"
	"fmt"
)

// Default is the file name of the configuration for most nodes, and Pod that of the same network with the plugin podlace-pod.
const (
	Default = "10-podlace.conflist"
	Pod     = "10-podlace-pod.conflist"
)

//go:embed *.conflist
var files embed.FS

// Conflist returns the shipped configuration with the given file name.
func Conflist(name string) ([]byte, error) {
	data, err := files.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("no such shipped configuration: %w", err)
	}
	return data, nil
}

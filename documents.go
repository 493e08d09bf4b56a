// SPDX-License-Identifier: Apache-2.0

// Package podlace holds the documents that 'podlace explain' and 'podlace topology' read: the tables of keys and codes, and the style of
// the pictures, have one place.
package podlace

import "embed"

// Documents are the READMEs of the plugins, the documents with error codes and with the keys of podlace-node, and the style sheet of the
// pictures.
//
//go:embed plugins/*/README.md docs/ARCHITECTURE.md docs/CLUSTER.md docs/dark.css
var Documents embed.FS

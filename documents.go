// SPDX-License-Identifier: Apache-2.0

// Package podlace embeds the documents that the commands 'podlace explain' and 'podlace topology' read. Because of the embedded documents,
// the commands need no separate document files.
package podlace

import "embed"

// Documents contains the READMEs of the plugins, the table of error codes, the keys of podlace-node, and the style sheet of the pictures.
//
//go:embed plugins/*/README.md docs/ARCHITECTURE.md docs/CLUSTER.md docs/dark.css
var Documents embed.FS

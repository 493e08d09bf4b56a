// SPDX-License-Identifier: Apache-2.0

// Package podlace embeds the documents that the command 'podlace explain' reads, so that it needs no separate files.
package podlace

import "embed"

// Documents contains the READMEs of the plugins, the table of error codes and the keys of podlace-node.
//
//go:embed plugins/*/README.md docs/ARCHITECTURE.md docs/CLUSTER.md
var Documents embed.FS

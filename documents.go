// SPDX-License-Identifier: Apache-2.0

// Package podlace holds the documents that 'podlace explain' reads: the tables of keys and codes have one place.
package podlace

import "embed"

// Documents are the READMEs of the plugins, and the documents with error codes and with the keys of podlace-node.
//
//go:embed plugins/*/README.md docs/ARCHITECTURE.md docs/CLUSTER.md
var Documents embed.FS

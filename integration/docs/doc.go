// SPDX-License-Identifier: Apache-2.0

// Package docs keeps the documents honest. Its tests run every configuration, every command and every error that the README files
// show, through the real programs in a sandbox, and compare what the documents list with what the source has: keys, error codes,
// packages, nftables tables, the changes of one ADD.
//
// -update rewrites the listings in docs/ that are output of programs.
package docs

// SPDX-License-Identifier: Apache-2.0

// Package docs tests the documents. Its tests run every configuration, command and error of the README files through the real programs
// in a sandbox. They compare the documents' lists with the source: keys, error codes, packages, nftables tables, and the changes of
// one ADD.
//
// -update rewrites the listings in docs/ that are output of programs.
package docs

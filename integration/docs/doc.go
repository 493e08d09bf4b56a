// SPDX-License-Identifier: Apache-2.0

// Package docs tests the documents. It runs the configurations and commands of the READMEs with the real programs in a sandbox and compares
// results and errors. Lists are compared with the source: keys, error codes, packages, nftables tables, and the changes of one ADD.
//
// With -update, the tests rewrite the listings in docs/ that show the output of programs.
package docs

// SPDX-License-Identifier: Apache-2.0

// Package docs tests the documents. The tests of this package run the configurations and commands of the README files with the real
// programs in a sandbox, and compare results and errors. The tests also compare lists in the documents with the source: keys, error codes,
// packages, nftables tables, and the changes of one ADD.
//
// With the flag -update, the tests rewrite the listings in docs/ that show the output of programs.
package docs

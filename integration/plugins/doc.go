// SPDX-License-Identifier: Apache-2.0

// Package plugins tests the plugins as a runtime meets them: as programs, by environment, standard input and output, and by what they leave
// in the kernel.
//
//   - testdata/script holds testscript scripts, one per promise; -update rewrites
//     their golden output.
//   - TestChain* drive whole conflists through libcni in every version.
//   - TestBehind* chain portmap and bandwidth after third-party main plugins, and
//     between third-party plugins; harness/calico stands in for Calico's plugin.
//   - TestBad* hold tables of input that must be refused, TestGood* and TestRuntime* of
//     input that must not.
package plugins

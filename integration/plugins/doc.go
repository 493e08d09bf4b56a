// SPDX-License-Identifier: Apache-2.0

// Package plugins tests the plugins as a runtime calls them: as programs, by environment, standard input and output, and kernel state.
//
//   - testdata/script holds testscript scripts, one per behaviour; -update rewrites
//     their golden output.
//   - TestChain* drive whole conflists through libcni in every version.
//   - TestBehind* chain portmap and bandwidth after third-party main plugins, and
//     between third-party plugins; harness/calico stands in for Calico's plugin.
//   - TestBad* contain tables of invalid input. TestGood* and TestRuntime* contain unusual but valid input.
package plugins

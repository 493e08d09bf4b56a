// SPDX-License-Identifier: Apache-2.0

// Package integration tests the plugins as a runtime meets them: as programs,
// by environment, standard input and output, and by what they leave in the
// kernel. Nothing of the plugins' code is imported.
//
//   - testdata/script holds testscript scripts, one per promise; -update rewrites
//     their golden output.
//   - TestChain* drive whole conflists through libcni in every version.
//   - TestBehind* chain portmap and bandwidth after main plugins of others, and
//     between plugins of others; calico stands in for the plugin of that name.
//   - TestBad* hold tables of input that must be refused, TestGood* and TestRuntime* of
//     input that must not.
//   - TestSweep* kill the chain between any two changes and look for leftovers.
//   - TestFault* bring about whatever else may go wrong on a node.
//
// PODLACE_BIN names a folder with other binaries to test, for instance those of
// the reference plugins; without it the plugins of this tree are built.
// FAULTS=all visits every point instead of a sample.
package integration

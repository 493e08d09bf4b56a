// SPDX-License-Identifier: Apache-2.0

// Package plugins calls the plugins as a runtime does, with environment variables and a configuration on standard input, and checks their
// output and their effects on the kernel's state.
//
//   - testdata/script has testscript scripts, one for each behaviour, whose expected output -update rewrites.
//   - TestChain* run whole conflists through libcni in every version of the specification.
//   - TestBehind* run portmap and bandwidth after and between other projects' plugins. harness/calico emulates Calico's.
//   - TestBad* call the plugins with invalid input, TestGood* and TestRuntime* with unusual but valid input.
package plugins

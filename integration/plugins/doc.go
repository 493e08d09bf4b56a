// SPDX-License-Identifier: Apache-2.0

// Package plugins tests the plugins as a runtime calls them: programs with an environment, standard input and output, and effects on the
// kernel's state.
//
//   - testdata/script contains testscript scripts, one for each behaviour. The flag -update rewrites their expected output.
//   - TestChain* run whole conflists through libcni in every version of the specification.
//   - TestBehind* run portmap and bandwidth after third-party main plugins, and between third-party plugins. The program harness/calico
//     takes the place of Calico's plugin.
//   - TestBad* contain tables of invalid input. TestGood* and TestRuntime* contain unusual but valid input.
package plugins

// SPDX-License-Identifier: Apache-2.0

// Package plugins calls the plugins as a runtime does: each test starts a plugin with environment variables and a configuration on standard
// input. The tests check the plugin's output and its effects on the kernel's state.
//
//   - testdata/script contains testscript scripts, one for each behaviour. The flag -update rewrites the expected output in these scripts.
//   - TestChain* run whole conflists through libcni in every version of the specification.
//   - TestBehind* run portmap and bandwidth after third-party main plugins, and between third-party plugins. The program harness/calico
//     emulates Calico's plugin.
//   - TestBad* call the plugins with invalid input. TestGood* and TestRuntime* call the plugins with unusual but valid input.
package plugins

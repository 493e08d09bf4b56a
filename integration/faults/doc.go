// SPDX-License-Identifier: Apache-2.0

// Package faults injects every fault that can happen on a node, and looks for leaked state.
//
//   - TestAdd, TestDel, TestGC, TestFirst and TestLimits let each kernel or file change of a call fail once. A failed call prints one error
//     document with a code. A failed ADD restores the state before it. The next DEL or GC removes what a failed one has left.
//   - TestLives injects random faults while pods with VFs start and end.
//   - TestSoak injects random faults, flushes and losses of records on a node with many pods. `make soak` runs it for a long time.
//   - TestRuntimes emulates how containerd and CRI-O react to failed and killed calls, on the same node as TestSoak.
//   - TestSweep* kill the chain between any two changes.
//   - TestFault* and TestXTables inject the remaining faults.
//
// By default, the tests inject faults at a sample of all points, and with FAULTS=all at every point.
package faults

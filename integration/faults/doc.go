// SPDX-License-Identifier: Apache-2.0

// Package faults injects every fault that can happen on a node, and looks for leaked state.
//
//   - TestAdd, TestDel, TestGC, TestFirst and TestLimits let each change of the system fail once. A failed call prints one error document
//     with a code. A failed ADD restores everything. After a failed DEL or GC, the next DEL or GC finishes.
//   - TestLives injects random faults while pods with VFs start and end.
//   - TestSoak injects random faults, flushes and losses of records on a node with many pods. `make soak` runs it for a long time.
//   - TestRuntimes emulates how containerd and CRI-O react to failed and killed calls, on the same node as TestSoak.
//   - TestSweep* kill the chain between any two changes.
//   - TestFault* and TestXTables inject the remaining faults.
//
// The tests visit a sample of the points. With FAULTS=all, the tests visit every point.
package faults

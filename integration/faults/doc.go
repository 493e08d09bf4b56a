// SPDX-License-Identifier: Apache-2.0

// Package faults injects every fault that can happen on a node, and looks for leaked state.
//
//   - TestAdd, TestDel, TestGC, TestFirst and TestLimits let each change of the system fail once. The error must be one document with a
//     code, a failed ADD must restore everything, and after a failed DEL or GC the next one must finish.
//   - TestLives injects faults at random while pods with VFs come and go.
//   - TestSoak injects faults, flushes and losses of records at random on a node with many pods; make soak runs it for a long time.
//   - TestRuntimes emulates on the same node how containerd and CRI-O behave when their calls fail or are killed.
//   - TestSweep* kill the chain between any two changes.
//   - TestFault* and TestXTables inject the remaining faults.
//
// FAULTS=all visits every point instead of a sample.
package faults

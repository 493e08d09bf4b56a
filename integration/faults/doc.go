// SPDX-License-Identifier: Apache-2.0

// Package faults brings about what may go wrong on a node, and looks for what is left.
//
//   - TestAdd, TestDel, TestGC, TestFirst and TestLimits let each change of the system fail once: the error has to be one document with a
//     code, a failed ADD has to leave everything as it was before, and after a failed DEL or GC the next one has to finish.
//   - TestLives does so at random while pods with VFs come and go.
//   - TestSoak does it to a node with many pods at random, with flushes and losses of records besides; make soak plays it for long.
//   - TestRuntimes does to the same node what containerd and CRI-O do on a bad day.
//   - TestSweep* kill the chain between any two changes.
//   - TestFault* and TestXTables bring about whatever else may go wrong.
//
// FAULTS=all visits every point instead of a sample.
package faults

// SPDX-License-Identifier: Apache-2.0

// Package faults brings about what may go wrong on a node, and looks for what is left.
//
//   - TestAdd, TestDel, TestGC, TestFirst and TestLimits let each change of the system fail once: the error has to be one document with a
//     code, a failed ADD has to leave everything as it was before, and after a failed DEL or GC the next one has to finish.
//   - TestLives does so at random while pods with VFs come and go.
//   - TestSweep* kill the chain between any two changes.
//   - TestFault* and TestXTables bring about whatever else may go wrong.
//
// FAULTS=all visits every point instead of a sample.
package faults

// SPDX-License-Identifier: Apache-2.0

// Package fault is where every change of the system passes: the kernel door and the state store call Point right before each
// change, and Step where else a killed process leaves another state: between two system calls of one change, and after the last change.
// Production builds compile both to nothing. Binaries built with the tag podlace_fault fail the nth change of the process, so that a test
// can fail every change of every verb once. They run a command at the nth moment, which kills the process, sends a signal, or changes the
// node.
package fault

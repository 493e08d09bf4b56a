// SPDX-License-Identifier: Apache-2.0

// Package fault is where every change of the system passes: the kernel door and the state store call Point right before each
// change. Production builds compile it to nothing. Binaries built with the tag podlace_fault fail the nth change of the
// process, so that a test can fail every change of every verb once.
package fault

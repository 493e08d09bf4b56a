// SPDX-License-Identifier: Apache-2.0

// Package fault tests what the plugins leave behind when something fails in the middle. It builds them with the tag podlace_fault, which
// lets the nth change of the system fail, and does so once for each change of each verb: the error has to be one document with a code,
// a failed ADD has to leave everything as it was before, and after a failed DEL or GC the next one has to finish.
//
// PODLACE_FAULT_BIN names a folder with binaries that were built so; without it they are built from this tree.
package fault

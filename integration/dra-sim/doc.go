// SPDX-License-Identifier: Apache-2.0

// Command dra-sim measures the scheduler's allocator in a cluster of 5,000 nodes with Podlace's ResourceSlices, and prints a table. The
// tests check Podlace's DRA objects with Kubernetes' own validation, CEL compiler and allocator.
package main

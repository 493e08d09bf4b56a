// SPDX-License-Identifier: Apache-2.0

// Command dra-sim measures the time of the scheduler's allocator in a cluster of 5,000 nodes with Podlace's ResourceSlices, and prints a
// table. The tests check Podlace's DRA objects with Kubernetes' own code: the API server's validation, the CEL compiler for
// selectors, and the scheduler's allocator.
package main

// SPDX-License-Identifier: Apache-2.0

// Command dra-sim measures the time of the scheduler's allocator in a cluster of 5,000 nodes with Podlace's ResourceSlices, and prints a
// table for docs/DRA.md. The tests run Podlace's DRA objects through Kubernetes' own code: the validation of the API server, the CEL
// compiler for selectors, and the allocator of the scheduler.
package main

// SPDX-License-Identifier: Apache-2.0

// Command dra-sim compares Podlace's part of Dynamic Resource Allocation with Kubernetes' own code: the validation of the API server, the
// CEL of selectors, and the allocator of the scheduler. The program measures how long the allocator takes in a cluster of 5,000 nodes, and
// prints a table for docs/DRA.md.
package main

// SPDX-License-Identifier: Apache-2.0

// Package kernels tests what users do with Podlace on each kernel that they have. "make kernels" runs it in a virtual machine for each
// kernel of scripts/vm/kernels, as root without a user namespace, as plugins run on a node. Without it, the tests are skipped.
package kernels

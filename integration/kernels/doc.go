// SPDX-License-Identifier: Apache-2.0

// Package kernels contains tests of what users do with Podlace, for each kernel that users have. "make kernels" starts the tests in a
// virtual machine once for each kernel of scripts/vm/kernels. In the machine, the tests run as root without a user namespace, as the
// plugins do on a node. Without "make kernels", the tests are skipped.
package kernels

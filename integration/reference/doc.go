// SPDX-License-Identifier: Apache-2.0

// Package reference holds no code: its module pins the reference plugins with which the tests and the benchmark compare, as tools. The
// script scripts/reference.sh builds them.
package reference

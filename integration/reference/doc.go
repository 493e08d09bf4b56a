// SPDX-License-Identifier: Apache-2.0

// Package reference contains no code. The file go.mod in this folder pins the versions of the reference plugins as tools. The tests and the
// benchmark compare Podlace with the reference plugins. The script scripts/reference.sh builds the reference plugins.
package reference

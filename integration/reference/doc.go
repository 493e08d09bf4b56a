// SPDX-License-Identifier: Apache-2.0

// Package reference has no code. Its go.mod pins the reference plugins, with which tests and benchmark compare Podlace, as tools that
// scripts/reference.sh builds.
package reference

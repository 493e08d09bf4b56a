// SPDX-License-Identifier: Apache-2.0

//go:build !podlace_fault

package fault

// Point does nothing in a production build and never returns an error.
func Point(string) error { return nil }

// Step does nothing in a production build.
func Step(string, string, ...int) {}

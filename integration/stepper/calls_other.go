// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package main

// oldCalls are those that newer architectures no longer have.
func oldCalls() map[uint64]string { return nil }

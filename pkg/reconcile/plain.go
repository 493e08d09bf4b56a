// SPDX-License-Identifier: Apache-2.0

package reconcile

// Lengths up to which texts are shown.
const (
	MaxName    = 128 // a name that a pod brings
	MaxMessage = 1024
)

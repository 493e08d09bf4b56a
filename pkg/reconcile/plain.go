// SPDX-License-Identifier: Apache-2.0

package reconcile

// These constants are the maximum lengths of displayed texts.
const (
	MaxName    = 128 // a name that a pod can choose
	MaxMessage = 1024
)

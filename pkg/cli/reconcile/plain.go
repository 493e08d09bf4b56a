// SPDX-License-Identifier: Apache-2.0

package reconcile

// Maximum lengths of texts that commands display.
const (
	MaxName    = 128 // a name that a pod can choose
	MaxMessage = 1024
)

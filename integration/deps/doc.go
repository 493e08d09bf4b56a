// SPDX-License-Identifier: Apache-2.0

// Package deps tests the imports of packages, the packages that the CNI binaries link, and the sizes of these binaries. The runtime starts
// a CNI plugin several times for each pod, so each additional package slows the start of every pod.
package deps

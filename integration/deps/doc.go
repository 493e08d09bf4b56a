// SPDX-License-Identifier: Apache-2.0

// Package deps tests the imports of packages, the packages that the CNI binaries link, and the sizes of these binaries. A CNI plugin starts
// several times for each pod, so each linked package slows the start of every pod.
package deps

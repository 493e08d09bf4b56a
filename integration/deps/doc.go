// SPDX-License-Identifier: Apache-2.0

// Package deps tests the imports of packages, the packages that the CNI binaries link, and the binaries' sizes. A CNI plugin starts several
// times for each pod, so each additional package slows down every pod.
package deps

// SPDX-License-Identifier: Apache-2.0

// Package deps tests what depends on what: which packages may import which, what is linked into the CNI binaries, and how large they are.
// A CNI plugin is started several times for each pod, so that what it links, every pod pays for.
package deps

// SPDX-License-Identifier: Apache-2.0

// Package deps tests dependencies: which packages may import which, what the CNI binaries link, and how large they are. A CNI plugin
// starts several times for each pod, so that every pod pays for what the plugin links.
package deps

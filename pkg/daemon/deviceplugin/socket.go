// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"crypto/sha256"
	"encoding/hex"
	"path/filepath"
	"strings"

	"github.com/podlace/podlace/pkg/daemon/probes"
)

// socketName returns a new random name for the socket of a resource's endpoint. Two instances may run during an update, and the kubelet
// opens no new connection for a path that it knows.
func socketName(dir, resource string) string {
	return socketPrefix(dir, resource) + probes.RandomHex() + socketSuffix
}

const socketSuffix = ".sock"

// socketPrefix returns what a resource's socket names have before their eight hexadecimal digits: a hash of the resource if the path
// would be too long otherwise.
func socketPrefix(dir, resource string) string {
	name := strings.ReplaceAll(resource, "/", "_")
	if room := probes.MaxSocketPath - len(filepath.Join(dir, "-00000000"+socketSuffix)); len(name) > room {
		sum := sha256.Sum256([]byte(resource))
		name = "podlace-" + hex.EncodeToString(sum[:6])
	}
	return name + "-"
}

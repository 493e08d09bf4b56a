// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"crypto/sha256"
	"encoding/hex"
	"path/filepath"
	"strings"

	"github.com/podlace/podlace/pkg/daemon/probes"
)

// socketName returns a new file name for the socket of a resource's endpoint. The name is random, because two instances may run at the same
// time during an update. A new name is also needed because the kubelet does not open a new connection for a path that it already knows.
func socketName(dir, resource string) string {
	return socketPrefix(dir, resource) + probes.RandomHex() + socketSuffix
}

const socketSuffix = ".sock"

// socketPrefix returns the common prefix of a resource's socket names. Eight hexadecimal digits follow the prefix. If the socket's path
// would be too long, the prefix is a hash of the resource name.
func socketPrefix(dir, resource string) string {
	name := strings.ReplaceAll(resource, "/", "_")
	if room := probes.MaxSocketPath - len(filepath.Join(dir, "-00000000"+socketSuffix)); len(name) > room {
		sum := sha256.Sum256([]byte(resource))
		name = "podlace-" + hex.EncodeToString(sum[:6])
	}
	return name + "-"
}

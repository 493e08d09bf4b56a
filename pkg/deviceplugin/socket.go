// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"

	"github.com/podlace/podlace/pkg/probes"
)

// socketName is the file of a resource's endpoint in a folder. It is another one each time: two instances may overlap while one takes
// over from the other, and the kubelet takes a path that it knows for a connection that it has.
func socketName(dir, resource string) string {
	return socketPrefix(dir, resource) + probes.RandomHex() + socketSuffix
}

const socketSuffix = ".sock"

// socketPrefix is what the names of all sockets of a resource begin with; eight digits follow. It is a hash where the name has no room.
func socketPrefix(dir, resource string) string {
	name := strings.ReplaceAll(resource, "/", "_")
	if room := probes.MaxSocketPath - len(filepath.Join(dir, "-00000000"+socketSuffix)); len(name) > room {
		sum := sha256.Sum256([]byte(resource))
		name = "podlace-" + hex.EncodeToString(sum[:6])
	}
	return name + "-"
}

// removeStale deletes sockets of a resource that no longer answer: those of instances that were killed.
func removeStale(dir, resource string) {
	names, _ := filepath.Glob(filepath.Join(dir, socketPrefix(dir, resource)+"????????"+socketSuffix))
	for _, path := range names {
		if !probes.Answered(path) {
			os.Remove(path)
		}
	}
}

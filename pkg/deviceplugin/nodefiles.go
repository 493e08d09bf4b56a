// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/podlace/podlace/pkg/devicefiles"
	"github.com/podlace/podlace/pkg/pool"
)

// nodeFiles finds the node's device files.
type nodeFiles struct{ dev, sysfs string }

// missingFile returns the reason if a device file is missing without which containers could not start, or "". RDMA's connection manager is
// optional for programs, so it is not checked.
func (n nodeFiles) missingFile(d pool.Device) string {
	if !d.VhostNet {
		return ""
	}
	for _, file := range []struct{ path, module string }{{devicefiles.VhostNet, "vhost_net"}, {devicefiles.TUN, "tun"}} {
		if !n.has(file.path) {
			return "needVhostNet: the node has no " + file.path + ": load the module " + file.module
		}
	}
	return ""
}

// has reports whether the node has a device file. The file may exist before its module, which the kernel loads when a program opens the
// file. In a container without the node's /dev, only a loaded module is visible.
func (n nodeFiles) has(file string) bool {
	for _, at := range []string{filepath.Join(n.dev, strings.TrimPrefix(file, defaultDev)),
		filepath.Join(n.sysfs, "class/misc", path.Base(file))} {
		if _, err := os.Stat(at); err == nil {
			return true
		}
	}
	return false
}

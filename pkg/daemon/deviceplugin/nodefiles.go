// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/podlace/podlace/pkg/daemon/devicefiles"
	"github.com/podlace/podlace/pkg/daemon/pool"
)

// nodeFiles looks up device files on the node.
type nodeFiles struct{ dev, sysfs string }

// missingFile returns an error text if the node lacks a device file that a container needs to start, and "" otherwise. missingFile ignores
// the device file of the RDMA connection manager, because programs work without it.
func (n nodeFiles) missingFile(d pool.Device) string {
	if !d.VhostNet {
		return ""
	}
	for _, file := range []struct{ path, module string }{{devicefiles.VhostNet, "vhost_net"}, {devicefiles.TUN, "tun"}} {
		if !n.hasFile(file.path) {
			return "needVhostNet: the node has no " + file.path + ": load the module " + file.module
		}
	}
	return ""
}

// hasFile reports whether the node has a device file. A device file may exist before its kernel module is loaded, because the kernel loads
// the module when a program opens the file. In a container without the node's /dev, the daemon can only see whether the module is loaded.
func (n nodeFiles) hasFile(file string) bool {
	for _, at := range []string{filepath.Join(n.dev, strings.TrimPrefix(file, defaultDev)),
		filepath.Join(n.sysfs, "class/misc", path.Base(file))} {
		if _, err := os.Stat(at); err == nil {
			return true
		}
	}
	return false
}

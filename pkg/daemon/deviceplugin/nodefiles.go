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

type nodeFiles struct{ dev, sysfs string }

// missingFile returns an error text if the node lacks a device file that a container needs to start, or "". The RDMA connection
// manager's does not count, because programs work without it.
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

// hasFile reports whether the node has a device file. It may exist before its kernel module is loaded, which opening it does. Without
// the node's /dev in its container, the daemon sees only whether the module is loaded.
func (n nodeFiles) hasFile(file string) bool {
	for _, at := range []string{filepath.Join(n.dev, strings.TrimPrefix(file, defaultDev)),
		filepath.Join(n.sysfs, "class/misc", path.Base(file))} {
		if _, err := os.Stat(at); err == nil {
			return true
		}
	}
	return false
}

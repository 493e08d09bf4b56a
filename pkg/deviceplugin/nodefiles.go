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

// nodeFiles is where the daemon sees which device files the node has.
type nodeFiles struct{ dev, sysfs string }

// missing returns which file a device lacks without which its containers could not start, "" if none. RDMA's connection manager is none of
// these: a program can do without.
func (n nodeFiles) missing(d pool.Device) string {
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

// has reports whether the node has a device file. The file may be there before its module, which is loaded when a program opens it. In a
// container without the node's /dev only a loaded module shows.
func (n nodeFiles) has(file string) bool {
	for _, at := range []string{filepath.Join(n.dev, strings.TrimPrefix(file, defaultDev)),
		filepath.Join(n.sysfs, "class/misc", path.Base(file))} {
		if _, err := os.Stat(at); err == nil {
			return true
		}
	}
	return false
}

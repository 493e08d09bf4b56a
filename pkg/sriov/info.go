// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// defaultInfoDir is the default folder of the CNI device information specification.
const defaultInfoDir = "/var/run/k8s.cni.cncf.io/devinfo/cni"

func parseInfo(c *requestConfig, raw rawConfig, _ *plugin.Request) error {
	c.InfoDir, c.InfoFile = cmp.Or(raw.InfoDir, defaultInfoDir), raw.RuntimeConfig.InfoFile
	if !filepath.IsAbs(c.InfoDir) {
		return plugin.KeyErrorf("deviceInfoDir", "deviceInfoDir %q: want an absolute path", c.InfoDir)
	}
	if c.InfoFile != "" && resolveVarRun(filepath.Dir(filepath.Clean(c.InfoFile))) != resolveVarRun(filepath.Clean(c.InfoDir)) {
		return plugin.Errorf(plugin.CodeConfig, "runtimeConfig.CNIDeviceInfoFile %q: want a file in %s (deviceInfoDir)", c.InfoFile, c.InfoDir)
	}
	return nil
}

// resolveVarRun replaces /var/run by /run, to which it is a symbolic link.
func resolveVarRun(path string) string {
	if strings.HasPrefix(path, "/var/run/") {
		return strings.TrimPrefix(path, "/var")
	}
	return path
}

// infoPath returns the path of a VF's device-info file, which a pod can compute from its UID and its interface name.
func (c requestConfig) infoPath(r *plugin.Request, v vf) string {
	if v.Default == r.IfName && c.InfoFile != "" {
		return filepath.Clean(c.InfoFile)
	}
	return filepath.Join(c.InfoDir, strings.ReplaceAll(cmp.Or(r.Pod.UID, r.ContainerID), "/", "-")+"-"+v.Name+"-device.json")
}

func writeInfo(path string, d pci.Device) error {
	dir, err := store.Make(filepath.Dir(path), 0o755)
	if err == nil {
		defer dir.Close()
		err = dir.Write(filepath.Base(path), d.Info(""), 0o644)
	}
	if err != nil {
		return fmt.Errorf("write the device-info file: %w", err)
	}
	return nil
}

// removeInfo removes a device-info file. It only logs errors, which must not prevent the restoration of the VF.
func (n *nodeSide) removeInfo(path string) {
	if path == "" {
		return
	}
	dir, err := store.Open(filepath.Dir(path))
	if err == nil {
		defer dir.Close()
		err = dir.Remove(filepath.Base(path))
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		n.r.Log.Warn("could not remove the device-info file", "file", path, "error", err)
	}
}

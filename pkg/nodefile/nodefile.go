// SPDX-License-Identifier: Apache-2.0

// Package nodefile reads and writes /run/podlace/node.json, from which the plugins get the podCIDRs of their node, the CIDRs of all pods,
// and the MTU of pods. podlace-node or an administrator writes it. It is on tmpfs, so a pod never gets values from before a reboot: without
// the file, pods cannot start.
package nodefile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"

	"syscall"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Path is the path of node.json.
const Path = store.Root + "/" + name

const name = "node.json"

// StatusName is the name of podlace-node's status file, which is in the folder of node.json.
const StatusName = "node-status.json"

// FlannelPath is the file in which flannel stores the podCIDRs of the node. Read uses it if Path does not exist.
const FlannelPath = "/run/flannel/subnet.env"

// Node is the content of node.json.
type Node struct {
	PodCIDRs []netip.Prefix `json:"podCIDRs"`
	// ClusterCIDRs are the CIDRs of the pods of all nodes, at most MaxClusterCIDRs. They replace the keyword useClusterCidr.
	ClusterCIDRs []netip.Prefix `json:"clusterCIDRs,omitempty"`
	// MTU is the MTU of the pods' interfaces in bytes, or 0 for that of the uplink.
	MTU int `json:"mtu,omitempty"`
}

// MaxClusterCIDRs is the maximum number of ClusterCIDRs. With more, the file could exceed 64 KiB, which older plugins refuse.
const MaxClusterCIDRs = 256

// maxFile is the maximum size in bytes of node.json and of flannel's file, which usually have a few hundred.
const maxFile = 64 << 10

// minMTU and maxMTU are the smallest and largest MTU that Linux accepts (ETH_MIN_MTU, IP_MAX_MTU).
const minMTU, maxMTU = 68, 65535

// Read returns the content of Path or, if that does not exist, of FlannelPath. file is the path that was read, or "" if neither exists. The
// API server is not asked, because pods must be able to start while it is unreachable.
func Read() (file string, node Node, err error) {
	for _, source := range []struct {
		file  string
		parse func([]byte) (Node, error)
	}{{Path, Parse}, {FlannelPath, parseFlannel}} {
		data, err := store.ReadSmall(source.file, maxFile, syscall.O_NOFOLLOW)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return source.file, Node{}, err
		}
		if node, err = source.parse(data); err != nil {
			return source.file, Node{}, fmt.Errorf("%s: %w", source.file, err)
		}
		return source.file, node, nil
	}
	return "", Node{}, fmt.Errorf("neither %s nor %s exists", Path, FlannelPath)
}

// Of returns the result of one Read for a whole request, including a built-in IPAM plugin, so that all code of an ADD, DEL or CHECK uses
// the same content.
func Of(r *plugin.Request) (file string, node Node, err error) {
	type content struct {
		file string
		node Node
		err  error
	}
	c := plugin.Once(r, func() (c content) {
		c.file, c.node, c.err = Read()
		return c
	})
	return c.file, c.node, c.err
}

// Write replaces node.json by an atomic rename, and reports whether its content changed. It refuses content that Read would refuse.
func Write(node Node) (changed bool, err error) {
	data, err := json.Marshal(node)
	if err == nil {
		_, err = Parse(data)
	}
	if n := len(node.ClusterCIDRs); err == nil && n > MaxClusterCIDRs {
		err = fmt.Errorf("%d clusterCIDRs: want at most %d", n, MaxClusterCIDRs)
	}
	if data = append(data, '\n'); err == nil && len(data) > maxFile {
		err = fmt.Errorf("larger than %d bytes", maxFile)
	}
	if err != nil {
		return false, fmt.Errorf("%s: %w", Path, err)
	}
	dir, err := store.Make(store.Root, 0o700)
	if err != nil {
		return false, err
	}
	defer dir.Close()
	if old, err := dir.Read(name); err == nil && bytes.Equal(old, data) {
		return false, nil
	}
	return true, dir.Write(name, data, 0o600)
}

// Remove deletes node.json. It is a no-op if the file does not exist.
func Remove() error {
	dir, err := store.Open(store.Root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Remove(name)
}

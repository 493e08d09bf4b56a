// SPDX-License-Identifier: Apache-2.0

// Package nodefile reads and writes /run/podlace/node.json, which gives the plugins the values of this node: its podCIDRs, the CIDRs
// of all pods, and the MTU. podlace-node or an administrator writes it. It is on tmpfs: after a boot no pod starts before it is
// written again.
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

// Path is the path of the file.
const Path = store.Root + "/" + name

const name = "node.json"

// StatusName is the file beside Path in which podlace-node reports about its node.
const StatusName = "node-status.json"

// FlannelPath is the file that flannel writes. Read uses its podCIDRs if Path does not exist.
const FlannelPath = "/run/flannel/subnet.env"

// Node is the content of the file.
type Node struct {
	PodCIDRs []netip.Prefix `json:"podCIDRs"`
	// ClusterCIDRs are the CIDRs of the pods of all nodes, at most MaxClusterCIDRs. useClusterCidr stands for them.
	ClusterCIDRs []netip.Prefix `json:"clusterCIDRs,omitempty"`
	// MTU of the pods' interfaces, in bytes; 0: the MTU of the uplink.
	MTU int `json:"mtu,omitempty"`
}

// MaxClusterCIDRs limits ClusterCIDRs: older plugins refuse a file of more than 64 KiB.
const MaxClusterCIDRs = 256

// maxFile limits the size of a file; both files usually have a few hundred bytes.
const maxFile = 64 << 10

// minMTU and maxMTU are the limits of Linux (ETH_MIN_MTU, IP_MAX_MTU).
const minMTU, maxMTU = 68, 65535

// Read returns the content of Path, or of flannel's file if Path does not exist. file is the path of the content or the error, or "".
// Read never asks the API server: a pod must be able to start without it.
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

// Of is Read, called once for a request and the requests derived from it for a built-in IPAM plugin, so that all parts of a verb see
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

// Write replaces the file by an atomic rename; changed is false if it already had this content. It refuses content that Read would
// refuse.
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

// Remove deletes the file. It is a no-op if there is none.
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

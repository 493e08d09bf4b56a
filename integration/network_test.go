// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
)

// network is one conflist as libcni sees it.
type network struct {
	cni    *libcni.CNIConfig
	list   *libcni.NetworkConfigList
	stderr bytes.Buffer
}

// do runs one verb of the whole chain; only ADD has a result.
func (n *network) do(verb string, rt *libcni.RuntimeConf, valid []types.GCAttachment) (types.Result, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	switch verb {
	case "ADD":
		return n.cni.AddNetworkList(ctx, n.list, rt)
	case "DEL":
		return nil, n.cni.DelNetworkList(ctx, n.list, rt)
	case "CHECK":
		return nil, n.cni.CheckNetworkList(ctx, n.list, rt)
	case "GC":
		return nil, n.cni.GCNetworkList(ctx, n.list, &libcni.GCArgs{ValidAttachments: valid})
	case "STATUS":
		return nil, n.cni.GetStatusNetworkList(ctx, n.list)
	}
	return nil, errors.New("unknown verb " + verb)
}

// openNetwork reads a conflist; exec replaces libcni's own way to start plugins.
func openNetwork(conflist []byte, cacheDir string, exec invoke.Exec) (*network, error) {
	list, err := libcni.NetworkConfFromBytes(conflist)
	if err != nil {
		return nil, fmt.Errorf("conflist: %w", err)
	}
	n := &network{list: list}
	if exec == nil {
		exec = n.exec()
	}
	n.cni = libcni.NewCNIConfigWithCacheDir([]string{binDir()}, cacheDir, exec)
	return n, nil
}

// exec starts plugins and keeps what they write to stderr.
func (n *network) exec() invoke.Exec {
	return &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: &n.stderr}}
}

// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
)

// Network runs the plugin chain of a conflist through libcni.
type Network struct {
	CNI    *libcni.CNIConfig
	List   *libcni.NetworkConfigList
	Stderr bytes.Buffer
}

// Do runs one verb of the chain. The result is nil except for ADD.
func (n *Network) Do(verb string, rt *libcni.RuntimeConf, valid []types.GCAttachment) (types.Result, error) {
	ctx, cancel := context.WithTimeout(context.Background(), CallLimit)
	defer cancel()
	switch verb {
	case "ADD":
		return n.CNI.AddNetworkList(ctx, n.List, rt)
	case "DEL":
		return nil, n.CNI.DelNetworkList(ctx, n.List, rt)
	case "CHECK":
		return nil, n.CNI.CheckNetworkList(ctx, n.List, rt)
	case "GC":
		return nil, n.CNI.GCNetworkList(ctx, n.List, &libcni.GCArgs{ValidAttachments: valid})
	case "STATUS":
		return nil, n.CNI.GetStatusNetworkList(ctx, n.List)
	}
	return nil, errors.New("unknown verb " + verb)
}

// Must runs one verb of the chain, which must succeed.
func (n *Network) Must(t testing.TB, verb string, rt *libcni.RuntimeConf, valid ...types.GCAttachment) Object {
	t.Helper()
	result, err := n.Do(verb, rt, valid)
	if err != nil {
		t.Fatalf("chain %s in version %s: %v\n%s", verb, n.List.CNIVersion, err, n.Stderr.String())
	}
	if result == nil {
		return nil
	}
	return RawObject(t, string(Encode(result)))
}

// OpenNetwork parses a conflist. libcni starts the plugins through exec or, if it is nil, Network.Exec.
func OpenNetwork(conflist []byte, cacheDir string, exec invoke.Exec) (*Network, error) {
	list, err := libcni.NetworkConfFromBytes(inForm(conflist))
	if err != nil {
		return nil, fmt.Errorf("conflist: %w", err)
	}
	n := &Network{List: list}
	if exec == nil {
		exec = n.Exec()
	}
	n.CNI = libcni.NewCNIConfigWithCacheDir([]string{BinDir()}, cacheDir, exec)
	return n, nil
}

// Exec returns an invoke.Exec that stores the plugins' stderr.
func (n *Network) Exec() invoke.Exec {
	return &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: &n.Stderr}}
}

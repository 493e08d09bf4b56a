// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/cli/chain"
	"github.com/podlace/podlace/pkg/cli/reconcile"
)

// A runner is a chain that can be adapted to the machine and collects the calls of each verb.
type runner struct {
	*chain.Chain
	folder, cache string
	calls         []chain.Call
}

func newRunner(folder, cache string, conflist []byte) (*runner, error) {
	r := &runner{folder: folder, cache: cache}
	return r, r.use(conflist)
}

func (r *runner) use(conflist []byte) error {
	list, err := reconcile.Load("", conflist)
	if err == nil {
		r.Chain = chain.New(r.folder, r.cache, list, func(c chain.Call) { r.calls = append(r.calls, c) })
	}
	return err
}

func (r *runner) takeCalls() []chain.Call {
	calls := r.calls
	r.calls = nil
	return calls
}

func (r *runner) add(ctx context.Context, a chain.Attachment) (*types100.Result, []chain.Call, error) {
	result, err := r.Add(ctx, a)
	return result, r.takeCalls(), err
}

func (r *runner) del(ctx context.Context, a chain.Attachment) ([]chain.Call, error) {
	err := r.Del(ctx, a)
	return r.takeCalls(), err
}

func (r *runner) check(ctx context.Context, a chain.Attachment) error {
	err := r.Check(ctx, a)
	r.takeCalls()
	return err
}

// pluginTypes returns the types of a conflist's plugins in order.
func pluginTypes(list *libcni.NetworkConfigList) (names []string) {
	for _, p := range list.Plugins {
		names = append(names, p.Network.Type)
	}
	return names
}

// coded returns the CNI error that err wraps, if any.
func coded(err error) (types.Error, bool) {
	var e *types.Error
	if errors.As(err, &e) {
		return *e, true
	}
	return types.Error{}, false
}

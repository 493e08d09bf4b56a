// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

type opened[T any] struct {
	ns  T
	err error
}

// Host returns the network namespace of the node, which is opened once for all parts of a request. It is closed at the end, when most of
// the RCU grace period has passed for which a close waits after a deletion in nf_tables.
func Host(r *plugin.Request) (*kernel.Node, error) {
	host := plugin.Once(r, func() (o opened[*kernel.Node]) {
		if o.ns, o.err = kernel.Host(); o.err == nil {
			r.AtEnd(o.ns.Close)
		}
		return o
	})
	return host.ns, host.err
}

// Pod returns the pod's network namespace, opened once like that of the node.
func Pod(r *plugin.Request) (*kernel.NS, error) {
	pod := plugin.Once(r, func() (o opened[*kernel.NS]) {
		if o.ns, o.err = kernel.Open(r.Netns); o.err == nil {
			r.AtEnd(o.ns.Close)
		}
		return o
	})
	return pod.ns, pod.err
}

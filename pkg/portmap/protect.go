// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"log/slog"
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// protect() restores the protection of the node's 127.0.0.0/8 after a flush, while hostPorts need route_localnet. ADD and DEL call
// protect() first, even if the pod has no ports. The call has no effect if loopbackUsers has no attachment and Podlace did not open the
// pod's links. If loopbackUsers has attachments, an ADD that forwards ports restores the protection together with its other rules. In this
// case, protect() has no effect.
func protect(r *plugin.Request, forwards bool) {
	if used := loopbackUsed(); used && forwards || !used && !opensLoopback(r) {
		return
	}
	if err := protectFlushed(r.Log); err != nil {
		r.Log.Warn("the protection of the node's 127.0.0.0/8 could not be restored", "error", err)
	}
}

// protectFlushed restores the protection if it is missing. The function does not wait for the lock.
func protectFlushed(log *slog.Logger) error {
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	if ok, err := loopbackProtected(host); err != nil || ok {
		return err
	}
	unlock, err := attachment.Trying.Node(portsLock)
	if err != nil {
		return attachment.Trying.Tolerate(err)
	}
	defer unlock()
	return protectAgain(host, log)
}

// mendFromRecords runs mendLoopback with the hashes of all recorded attachments.
func mendFromRecords(host *kernel.Node) error {
	records, err := attachment.AllOf("portmap")
	if err != nil {
		return err
	}
	var users []string
	for _, rec := range records {
		users = append(users, rec.Hash())
	}
	return mendLoopback(host, users)
}

// opensLoopback reports whether Podlace enabled route_localnet on an interface of the node that belongs to the pod.
func opensLoopback(r *plugin.Request) bool {
	return r.Prev != nil && slices.ContainsFunc(r.Prev.Interfaces, func(i *types100.Interface) bool {
		return i.Sandbox == "" && loopbackOpenedOn(i.Name)
	})
}

// protectAgain rewrites the protection if it is missing or changed. The caller holds portsLock.
func protectAgain(host *kernel.Node, log *slog.Logger) error {
	restored, err := restoreProtection(host)
	if restored {
		log.Warn("the protection of the node's 127.0.0.0/8 was missing or changed and is restored")
	}
	return err
}

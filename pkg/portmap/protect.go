// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// restoreFlushedProtection restores the rules that protect 127.0.0.0/8 if a flush removed them while hostPorts need route_localnet. ADD and
// DEL call it first, even for a pod without ports. It is a no-op if loopbackUsers has no attachment and Podlace did not enable
// route_localnet on the pod's links, or if this ADD forwards ports and so restores the rules itself.
func restoreFlushedProtection(r *plugin.Request, forwards bool) {
	if used := loopbackUsed(); used && forwards || !used && !opensLoopback(r) {
		return
	}
	if err := tryRestoreProtection(r); err != nil {
		r.Log.Warn("the protection of the node's 127.0.0.0/8 could not be restored", "error", err)
	}
}

// tryRestoreProtection restores missing rules that protect 127.0.0.0/8 without waiting for the lock.
func tryRestoreProtection(r *plugin.Request) error {
	host, err := attachment.Host(r)
	if err != nil {
		return err
	}
	if ok, err := loopbackSchema().Intact(&host.NFT); err != nil || ok {
		return err
	}
	unlock, err := attachment.Trying.Node(portsLock)
	if err != nil {
		return attachment.Trying.Tolerate(err)
	}
	defer unlock()
	return restoreProtection(host, r.Log)
}

// restoreRecordedLoopback calls restoreLoopback with the hashes of all recorded attachments.
func restoreRecordedLoopback(host *kernel.Node) error {
	records, err := attachment.AllOf("portmap")
	if err != nil {
		return err
	}
	var users []string
	for _, rec := range records {
		users = append(users, rec.Hash())
	}
	return restoreLoopback(host, users)
}

// opensLoopback reports whether Podlace enabled route_localnet on a link of the node that belongs to the pod.
func opensLoopback(r *plugin.Request) bool {
	return r.Prev != nil && slices.ContainsFunc(r.Prev.Interfaces, func(i *types100.Interface) bool {
		return i.Sandbox == "" && loopbackOpenedOn(i.Name)
	})
}

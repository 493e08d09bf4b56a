// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"log/slog"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// protect restores the protection of the node's 127.0.0.0/8 that a flush removed while hostPorts keep it open. ADD and DEL call it first,
// also for pods without ports. Without such hostPorts it is one look at a folder.
func protect(log *slog.Logger) {
	if !kernel.LoopbackUsed() {
		return
	}
	err := kernel.WithHost(func(host *kernel.Node) error {
		if ok, err := host.LoopbackProtected(); err != nil || ok {
			return err
		}
		unlock, err := attachment.Trying.Node(portsLock)
		if err != nil {
			return err
		}
		defer unlock()
		return protectAgain(host, log)
	})
	if err != nil && !attachment.Busy(err) {
		log.Warn("the protection of the node's 127.0.0.0/8 could not be restored", "error", err)
	}
}

// protectAgain writes the protection if a flush removed it. The caller holds the lock of the ports.
func protectAgain(host *kernel.Node, log *slog.Logger) error {
	if ok, err := host.LoopbackProtected(); err != nil || ok {
		return err
	}
	log.Warn("the protection of the node's 127.0.0.0/8 was flushed and is restored")
	return host.ProtectLoopback()
}

// mendLoopback makes route_localnet and its protection agree with what the node has. The caller holds the lock of the ports.
func mendLoopback(host *kernel.Node) error {
	records, err := attachment.All()
	if err != nil {
		return err
	}
	users := map[string]bool{}
	for _, rec := range records {
		if rec.Plugin == "portmap" {
			users[rec.Hash()] = true
		}
	}
	return host.MendLoopback(func(owner string) bool { return users[owner] })
}

// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/podlace/podlace/pkg/store"
)

// lockNode waits until no other agent runs on this node.
func lockNode(ctx context.Context, log *slog.Logger) (unlock func(), err error) {
	dir, err := store.Make(store.Root, 0o700)
	if err != nil {
		return nil, err
	}
	for told := false; ; told = true {
		lock, err := dir.Lock(0, lockName, 0o600)
		if err == nil {
			return func() { lock.Unlock(); dir.Close() }, nil
		}
		var held interface{ Busy() bool }
		if !errors.As(err, &held) {
			return nil, err
		}
		if !told {
			log.Info("another podlace-node runs on this node: waiting until it ends")
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

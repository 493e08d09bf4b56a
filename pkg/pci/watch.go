// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"context"
	"log/slog"
	"reflect"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
)

// One change of hardware is a burst of events: VFs come one by one. So it is looked only after a moment of quiet, but a stream that never
// rests does not put it off for ever.
const (
	quiet     = 100 * time.Millisecond
	noQuieter = time.Second
)

// Watch scans, and again after events of the kernel and after each poll at the latest, until ctx ends. Each snapshot that differs from the
// one before is delivered, the first at once, one after another by the goroutine of the caller. Only a first scan that fails is an error;
// later ones are logged. Without a poll (0) it depends on events, which a user namespace does not have for all devices.
func Watch(ctx context.Context, sysfs string, poll time.Duration, deliver func(*Snapshot)) error {
	ctx, stop := context.WithCancel(ctx)
	hints, err := kernel.Events(ctx, concerns)
	if err != nil {
		slog.Warn("changes of devices are seen by polling alone", "error", err)
	}
	// When it returns nothing is left that listens.
	defer func() {
		stop()
		for hints != nil {
			if _, more := <-hints; !more {
				return
			}
		}
	}()
	return watch(ctx, func() (*Snapshot, error) { return Scan(sysfs) }, hints, poll, deliver)
}

func watch(ctx context.Context, scan func() (*Snapshot, error), hints <-chan struct{}, poll time.Duration, deliver func(*Snapshot)) error {
	now, err := scan()
	if err != nil {
		return err
	}
	for deliver(now); await(ctx, hints, poll); {
		next, err := scan()
		if err != nil {
			slog.Warn("devices cannot be looked at, what was seen last stands", "error", err)
			continue
		}
		if !reflect.DeepEqual(now, next) && ctx.Err() == nil {
			now = next
			deliver(now)
		}
	}
	return nil
}

// await waits until it is time to scan; false means that ctx has ended.
func await(ctx context.Context, hints <-chan struct{}, poll time.Duration) bool {
	var slow <-chan time.Time
	if poll > 0 {
		slow = time.After(poll)
	}
	select {
	case <-ctx.Done():
		return false
	case <-slow:
		return true
	case <-hints:
	}
	for latest := time.After(noQuieter); ; {
		select {
		case <-ctx.Done():
			return false
		case <-latest:
			return true
		case <-time.After(quiet):
			return true
		case <-hints:
		}
	}
}

// concerns tells events that may be about a PCI function from those of the links that come and go with every pod.
func concerns(e kernel.Event) bool {
	switch {
	case e.Lost:
		return true
	case e.Device != "":
		return strings.Contains(e.Device, "/pci")
	}
	// Interfaces of cards have no kind, but for InfiniBand.
	return e.Kind == "" || e.Kind == "ipoib"
}

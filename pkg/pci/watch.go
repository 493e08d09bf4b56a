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

// Watch scans, and again after events of the kernel and after each poll at the latest. It sends each snapshot that differs from the one
// before, the first at once, until ctx ends. Then nothing listens any more, and the channel is closed. Only a first scan that fails is an
// error; later ones are logged. Without a poll (0) it depends on events, which a user namespace does not have for all devices.
func Watch(ctx context.Context, sysfs string, poll time.Duration) (<-chan *Snapshot, error) {
	ctx, cancel := context.WithCancel(ctx)
	events, err := kernel.Events(ctx)
	if err != nil {
		slog.Warn("changes of devices are seen by polling alone", "error", err)
	}
	first, err := Scan(sysfs)
	if err != nil {
		cancel()
		return nil, err
	}
	snapshots := make(chan *Snapshot, 1)
	snapshots <- first
	go func() {
		defer cancel()
		defer close(snapshots)
		watch(ctx, first, func() (*Snapshot, error) { return Scan(sysfs) }, events, poll, snapshots)
		for more := events != nil; more; {
			_, more = <-events
		}
	}()
	return snapshots, nil
}

func watch(ctx context.Context, now *Snapshot, scan func() (*Snapshot, error), events <-chan kernel.Event, poll time.Duration,
	to chan<- *Snapshot) {
	for await(ctx, events, poll) {
		next, err := scan()
		if err != nil {
			slog.Warn("devices cannot be looked at, what was seen last stands", "error", err)
			continue
		}
		if !reflect.DeepEqual(now, next) {
			now = next
			select {
			case to <- now:
			case <-ctx.Done():
			}
		}
	}
}

// await waits until it is time to scan; false means that ctx has ended.
func await(ctx context.Context, events <-chan kernel.Event, poll time.Duration) bool {
	var due, latest <-chan time.Time
	if poll > 0 {
		due = time.After(poll)
	}
	for {
		select {
		case <-ctx.Done():
			return false
		case <-latest:
			return true
		case <-due:
			return true
		case e := <-events:
			if !concerns(e) {
				continue
			}
			if due = time.After(quiet); latest == nil {
				latest = time.After(noQuieter)
			}
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

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

// VFs appear one by one, so a hardware change causes a burst of events. Watch scans once no event has arrived for the time `quiet`, or
// after noQuieter if they do not stop.
const (
	quiet     = 100 * time.Millisecond
	noQuieter = time.Second
)

// Watch scans at its start, after kernel events, and at the interval `poll` unless that is 0. It sends a snapshot only if it differs
// from the previous one, and closes the channel when ctx ends. Only a failure of the first scan is returned; later ones are logged. In
// a user namespace, the kernel sends events for only some devices.
func Watch(ctx context.Context, sysfs string, poll time.Duration) (<-chan *Snapshot, error) {
	ctx, cancel := context.WithCancel(ctx)
	events, err := kernel.Events(ctx)
	if err != nil {
		slog.Warn("no kernel events: changes of devices are seen only by polling", "error", err)
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
	for waitForChange(ctx, events, poll) {
		next, err := scan()
		if err != nil {
			slog.Warn("cannot scan devices; the last scan remains in use", "error", err)
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

// waitForChange waits until the next scan is due, and returns false if ctx has ended.
func waitForChange(ctx context.Context, events <-chan kernel.Event, poll time.Duration) bool {
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
			if !isRelevant(e) {
				continue
			}
			if due = time.After(quiet); latest == nil {
				latest = time.After(noQuieter)
			}
		}
	}
}

// isRelevant reports whether an event may be about a PCI function and not about the virtual link of a pod.
func isRelevant(e kernel.Event) bool {
	switch {
	case e.Lost:
		return true
	case e.Device != "":
		return strings.Contains(e.Device, "/pci")
	}
	// Interfaces of network cards have no kind, except InfiniBand.
	return e.Kind == "" || e.Kind == "ipoib"
}

// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"sync"
	"time"

	"github.com/podlace/podlace/pkg/restore"
)

// cause is why the agent compares the node with the wanted state.
type cause string

const (
	onStart  cause = "start"
	onAPI    cause = "api"
	onKernel cause = "kernel"
	onFiles  cause = "files"
	onPeriod cause = "periodic"
	onLook   cause = "look" // at files only: periodically, and for a new status of pods or probes
)

// times holds the intervals that are shorter in tests.
type times struct {
	probe          time.Duration // between rounds of probes
	announce       time.Duration // limit of the request that creates an Event
	poll           time.Duration // at files, in case an event was lost
	firstFileDelay time.Duration // how long failing routes may delay the first node.json
	trustDelay     time.Duration // how long a suspicious list must persist before routes are deleted
	conflictPause  time.Duration // between comparisons while routes of other programs are in the way: the kernel sends no event when they go
}

func usualTimes() times {
	return times{probe: 30 * time.Second, announce: 5 * time.Second, poll: time.Minute, firstFileDelay: 30 * time.Second,
		trustDelay: time.Minute, conflictPause: 10 * time.Second}
}

const (
	coalescing     = 100 * time.Millisecond
	mostCoalescing = 500 * time.Millisecond
)

// collectWindow returns how long causes are collected before the next comparison: four times the duration of the last one, so that
// comparisons use at most a fifth of a core. Only clusters with thousands of nodes notice the pause.
func collectWindow(comparison time.Duration) time.Duration {
	return min(max(coalescing, 4*comparison), mostCoalescing)
}

// alarm collects causes until the main loop handles them.
type alarm struct {
	mu     sync.Mutex
	causes map[cause]bool
	wakeup chan struct{}
}

func newAlarm() *alarm { return &alarm{causes: map[cause]bool{}, wakeup: make(chan struct{}, 1)} }

// wake adds a cause without blocking.
func (a *alarm) wake(why cause) {
	a.mu.Lock()
	a.causes[why] = true
	a.mu.Unlock()
	select {
	case a.wakeup <- struct{}{}:
	default:
	}
}

// wait returns the causes that came until the deadline. After the first one it collects more for the time `gather`, or for `pause` if that
// is longer and all of them may come from other programs. It returns at once when ctx is done.
func (a *alarm) wait(ctx context.Context, deadline time.Time, gather, pause time.Duration) map[cause]bool {
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(time.Until(deadline)):
	case <-a.wakeup:
	}
	for began := time.Now(); ctx.Err() == nil; {
		wait := gather
		if a.isContested() {
			wait = max(wait, pause)
		}
		if wait -= time.Since(began); wait <= 0 {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		case <-a.wakeup:
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	causes := a.causes
	a.causes = map[cause]bool{}
	return causes
}

// isContested reports whether each cause is a change in the kernel or of a file, which another program may have made.
func (a *alarm) isContested() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for why := range a.causes {
		if why != onKernel && why != onFiles {
			return false
		}
	}
	return len(a.causes) > 0
}

// contests has one contest for each kind of object, such as route or conflist.
type contests map[string]*restore.Contest

func (c contests) repaired(kind string, now time.Time) (began bool) {
	if c[kind] == nil {
		c[kind] = &restore.Contest{}
	}
	return c[kind].NoteRepair(now)
}

// wait returns the delay before the next step, which repairs all kinds of objects: the longest delay of any kind.
func (c contests) wait(now time.Time) (pause time.Duration) {
	for _, one := range c {
		pause = max(pause, one.Wait(now))
	}
	return pause
}

func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

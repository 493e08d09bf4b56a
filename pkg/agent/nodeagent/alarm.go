// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"sync"
	"time"
)

// The type cause is the reason why the agent compares the node with the wanted state.
type cause string

const (
	onStart  cause = "start"
	onAPI    cause = "api"
	onKernel cause = "kernel"
	onFiles  cause = "files"
	onPeriod cause = "periodic"
	onLook   cause = "look" // periodic look at files only
)

const (
	coalescing     = 100 * time.Millisecond
	mostCoalescing = 500 * time.Millisecond
)

// collectWindow returns the time for which the agent collects causes before the next comparison: four times the duration of the last
// comparison. Because of this pause, repeated comparisons use at most a fifth of a core. The pause is noticeable only in clusters with
// thousands of nodes.
func collectWindow(comparison time.Duration) time.Duration {
	return min(max(coalescing, 4*comparison), mostCoalescing)
}

// An alarm collects causes until the main loop of the agent handles them.
type alarm struct {
	mu     sync.Mutex
	causes map[cause]bool
	wakeup chan struct{}
}

func newAlarm() *alarm { return &alarm{causes: map[cause]bool{}, wakeup: make(chan struct{}, 1)} }

// wake() adds a cause. wake() never blocks.
func (a *alarm) wake(why cause) {
	a.mu.Lock()
	a.causes[why] = true
	a.mu.Unlock()
	select {
	case a.wakeup <- struct{}{}:
	default:
	}
}

// wait() waits for a cause until the deadline. After the first cause, wait() collects further causes for the time in the argument "gather",
// and returns all causes. If all causes may come from other programs, wait() collects causes for the time in "gather" or "pause", whichever
// is longer. When ctx is done, wait() returns immediately.
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

// isContested returns true if each cause is a change in the kernel or a change of a file. Another program may then have caused the alarm.
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

// The type contest limits how often the agent repairs a kind of object if another program undoes each repair. The lowest rate is one repair
// every 30 seconds.
type contest struct {
	last  time.Time
	count int
	pause time.Duration // delay before the next repair
}

// The type contests contains a separate contest for each kind of object, such as route or conflist.
type contests map[string]*contest

func (c contests) repaired(kind string, now time.Time) (began bool) {
	if c[kind] == nil {
		c[kind] = &contest{}
	}
	return c[kind].noteRepair(now)
}

// wait() returns the delay before the next call of step(). One call of step() repairs objects of all kinds, so this delay is the longest
// delay of all kinds.
func (c contests) wait(now time.Time) (pause time.Duration) {
	for _, one := range c {
		pause = max(pause, one.wait(now))
	}
	return pause
}

const (
	freeRepairs  = 5
	longestPause = 30 * time.Second
)

// noteRepair counts a repair. The result "began" is true for the first repair after which the agent delays the next repair.
func (c *contest) noteRepair(now time.Time) (began bool) {
	c.wait(now)
	c.last = now
	if c.count++; c.count <= freeRepairs {
		return false
	}
	began = c.pause == 0
	c.pause = min(max(2*c.pause, time.Second), longestPause)
	return began
}

// wait() returns the delay before the next repair of the same kind, or zero if the last repair was long ago.
func (c *contest) wait(now time.Time) time.Duration {
	if now.Sub(c.last) > max(10*time.Second, 2*c.pause) {
		c.count, c.pause = 0, 0
	}
	return c.pause
}

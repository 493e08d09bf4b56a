// SPDX-License-Identifier: Apache-2.0

package restore

import "time"

// Contest counts repairs that another program keeps undoing, and delays quick ones by up to LongestPause.
type Contest struct {
	last  time.Time
	count int
	pause time.Duration // delay before the next repair
}

// FreeRepairs is how many repairs are not delayed.
const FreeRepairs = 5

// LongestPause is the longest delay between repairs.
const LongestPause = 30 * time.Second

// contestMemory is the time after the last repair in which another one belongs to the same contest.
const contestMemory = 10 * time.Minute

// NoteRepair counts a repair. It reports true for the first one of a contest.
func (c *Contest) NoteRepair(now time.Time) (began bool) {
	quick := c.isQuick(now)
	if now.Sub(c.last) > contestMemory {
		c.count = 0
	}
	c.last = now
	if c.count++; c.count <= FreeRepairs || !quick {
		c.pause = 0
	} else {
		c.pause = min(max(2*c.pause, time.Second), LongestPause)
	}
	return c.count == FreeRepairs+1
}

// On reports whether there were more than FreeRepairs, the last of them in the last ten minutes.
func (c *Contest) On(now time.Time) bool {
	return c.count > FreeRepairs && now.Sub(c.last) <= contestMemory
}

// Wait returns the delay before the next repair, or 0 if the last one was not quick or long ago.
func (c *Contest) Wait(now time.Time) time.Duration {
	if !c.isQuick(now) {
		return 0
	}
	return c.pause
}

func (c *Contest) isQuick(now time.Time) bool {
	return now.Sub(c.last) <= max(10*time.Second, 2*c.pause)
}

// SPDX-License-Identifier: Apache-2.0

package restore

import "time"

// Contest delays repairs that another program keeps undoing, by up to LongestPause.
type Contest struct {
	last  time.Time
	count int
	pause time.Duration // delay before the next repair
}

// FreeRepairs is how many repairs are not delayed.
const FreeRepairs = 5

// LongestPause is the longest delay between repairs.
const LongestPause = 30 * time.Second

// NoteRepair counts a repair. It reports true for the first one after which repairs are delayed.
func (c *Contest) NoteRepair(now time.Time) (began bool) {
	c.Wait(now)
	c.last = now
	if c.count++; c.count <= FreeRepairs {
		return false
	}
	began = c.pause == 0
	c.pause = min(max(2*c.pause, time.Second), LongestPause)
	return began
}

// Wait returns the delay before the next repair, or 0 if the last one was long ago.
func (c *Contest) Wait(now time.Time) time.Duration {
	if now.Sub(c.last) > max(10*time.Second, 2*c.pause) {
		c.count, c.pause = 0, 0
	}
	return c.pause
}

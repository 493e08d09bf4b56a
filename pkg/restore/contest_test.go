// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"testing"
	"time"
)

// TestContest: the first repairs are immediate, later ones ever more delayed, until a pause without repairs.
func TestContest(t *testing.T) {
	var c Contest
	now, began := time.Now(), 0
	for i := range 20 {
		now = now.Add(c.pause + 100*time.Millisecond)
		if c.NoteRepair(now) {
			began++
		}
		if free := i < FreeRepairs; free && c.pause != 0 || c.On(now) == free {
			t.Errorf("repair %d waits %v, contest %v", i, c.pause, c.On(now))
		}
	}
	if began != 1 || c.pause != LongestPause {
		t.Errorf("told %d times, %v", began, c.pause)
	}
	if c.NoteRepair(now.Add(2*LongestPause + time.Second)); c.pause != 0 {
		t.Errorf("%v after a quiet time", c.pause)
	}
}

// TestContestEnds: a repair is not delayed if the last one was long ago.
func TestContestEnds(t *testing.T) {
	c := Contest{last: time.Now(), count: 20, pause: LongestPause}
	if got := c.Wait(c.last.Add(LongestPause)); got != LongestPause {
		t.Errorf("%v during the contest", got)
	}
	if got := c.Wait(c.last.Add(time.Hour)); got != 0 || c.On(c.last.Add(time.Hour)) || !c.On(c.last.Add(time.Minute)) {
		t.Errorf("%v after an hour", got)
	}
}

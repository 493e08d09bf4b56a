// SPDX-License-Identifier: Apache-2.0

package meter

import "time"

// pauseTick is how often the watch reads the clock. A shorter delay does not count as a pause, since timers of an idle machine have it too.
const pauseTick = time.Millisecond

// watchPauses measures the total pauses of this process, by the delay of a timer, until the returned function is called.
func watchPauses() (stop func() time.Duration) {
	ended, sum := make(chan struct{}), make(chan time.Duration)
	last := time.Now() // on a busy machine the goroutine below may start after a first pause
	go func() {
		tick := time.NewTicker(pauseTick)
		defer tick.Stop()
		var paused time.Duration
		for more := true; more; {
			select {
			case <-ended:
				more = false // a pause may have been the last event
			case <-tick.C:
			}
			now := time.Now()
			if late := now.Sub(last) - pauseTick; late > pauseTick {
				paused += late
			}
			last = now
		}
		sum <- paused
	}()
	return func() time.Duration {
		close(ended)
		return <-sum
	}
}

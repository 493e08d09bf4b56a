// SPDX-License-Identifier: Apache-2.0

package meter

import "time"

// pauseTick is the interval at which watchPauses reads the clock. A delay of this length is no pause, because even an idle machine delays
// timers by it.
const pauseTick = time.Millisecond

// watchPauses starts to measure, by timers that fire late, how long the process is paused. The returned function ends this and returns the
// sum.
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

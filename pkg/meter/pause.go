// SPDX-License-Identifier: Apache-2.0

package meter

import "time"

// pauseTick is the interval at which watchPauses reads the clock. A delay up to this length does not count as a pause, because timers on an
// idle machine have such delays too.
const pauseTick = time.Millisecond

// watchPauses starts to measure the time for which this process did not run. It uses the delays of a timer as a measure of this time. The
// returned function ends the measurement and returns the sum of all pauses.
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

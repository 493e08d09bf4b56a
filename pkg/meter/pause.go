// SPDX-License-Identifier: Apache-2.0

package meter

import "time"

// pauseTick is how often the watch looks at the clock. A shorter delay is no pause: timers of a quiet machine have it too.
const pauseTick = time.Millisecond

// watchPauses adds up the pauses of this process, by the delay of a timer, until the returned function is called.
func watchPauses() (stop func() time.Duration) {
	ended, sum := make(chan struct{}), make(chan time.Duration)
	last := time.Now() // a busy machine may begin the function below after a first pause
	go func() {
		tick := time.NewTicker(pauseTick)
		defer tick.Stop()
		var paused time.Duration
		for more := true; more; {
			select {
			case <-ended:
				more = false // the pause may have been the last thing that happened
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

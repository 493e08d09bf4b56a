// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"sync"
	"time"
)

const (
	// firstRepeat is the pause before the same failure is logged again. The pause doubles after each log line, up to longestRepeat.
	firstRepeat   = time.Minute
	longestRepeat = time.Hour
)

// repeatLimit limits how often the same failure is logged.
type repeatLimit struct {
	mu sync.Mutex
	of map[string]repeat
}

type repeat struct {
	text  string
	next  time.Time // next time to log the failure
	pause time.Duration
}

// isDue reports whether the error of the operation `key` must be logged: it is new, has another text, or the pause since the last log
// line is over. A nil error means success.
func (r *repeatLimit) isDue(key string, err error, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		delete(r.of, key)
		return false
	}
	one, known := r.of[key]
	if known && one.text == err.Error() && now.Before(one.next) {
		return false
	}
	if one.pause = min(2*one.pause, longestRepeat); one.text != err.Error() {
		one.pause = firstRepeat
	}
	one.text, one.next = err.Error(), now.Add(one.pause)
	if r.of == nil {
		r.of = map[string]repeat{}
	}
	for other, f := range r.of { // drop failures of callers that have given up
		if now.After(f.next.Add(longestRepeat)) {
			delete(r.of, other)
		}
	}
	r.of[key] = one
	return true
}

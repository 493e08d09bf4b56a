// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"sync"
	"time"
)

const (
	// firstRepeat is the pause before a failure that goes on is logged again. The pause doubles each time, up to longestRepeat.
	firstRepeat   = time.Minute
	longestRepeat = time.Hour
)

// repeats limits how often a failure is logged that callers run into again and again.
type repeats struct {
	mu sync.Mutex
	of map[string]repeat
}

type repeat struct {
	text  string
	next  time.Time // when the failure is logged again
	pause time.Duration
}

// due reports whether an error under a key is to be logged now: the first one, one with another text, or the same one after a pause. No
// error ends the failure.
func (r *repeats) due(key string, err error, now time.Time) bool {
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
	for other, f := range r.of { // of callers that have given up
		if now.After(f.next.Add(longestRepeat)) {
			delete(r.of, other)
		}
	}
	r.of[key] = one
	return true
}

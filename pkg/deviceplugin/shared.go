// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"sync"
	"time"
)

// sharedInterval is the smallest interval of shared calls. At this rate they use a tenth of the kubelet's rate limit.
const sharedInterval = 100 * time.Millisecond

// shared is a call whose answer serves all callers that wait for it.
type shared struct {
	mu    sync.Mutex
	began time.Time     // start of the last call
	done  chan struct{} // closed when the current call ends; nil if there is none
}

// begin reports whether the caller must make the call, and then call end. If another caller is making it, begin waits for its end and
// returns false. It also enforces sharedInterval, and returns early if ctx ends.
func (s *shared) begin(ctx context.Context) bool {
	s.mu.Lock()
	if done := s.done; done != nil {
		s.mu.Unlock()
		select {
		case <-done:
		case <-ctx.Done():
		}
		return false
	}
	s.done = make(chan struct{})
	pause := time.Until(s.began.Add(sharedInterval))
	s.mu.Unlock()
	select {
	case <-time.After(pause):
	case <-ctx.Done():
	}
	s.began = time.Now()
	return true
}

// end wakes all waiting callers.
func (s *shared) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.done)
	s.done = nil
}

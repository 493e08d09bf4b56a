// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"sync"
	"time"
)

// shareEvery is the least time between two shared questions: they take a tenth of the kubelet's rate limit.
const shareEvery = 100 * time.Millisecond

// shared is a question whose answer serves all callers that wait for it.
type shared struct {
	mu    sync.Mutex
	began time.Time     // of the last question
	done  chan struct{} // closed when the present question is answered; nil while none is asked
}

// begin reports whether the caller is to ask, and to call end then. It waits while another caller asks, and for its turn. It returns early
// when ctx ends.
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
	pause := time.Until(s.began.Add(shareEvery))
	s.mu.Unlock()
	select {
	case <-time.After(pause):
	case <-ctx.Done():
	}
	s.began = time.Now()
	return true
}

// end wakes all callers that wait for the answer.
func (s *shared) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.done)
	s.done = nil
}

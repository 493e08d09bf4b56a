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

// share calls ask, or waits while another caller does. It returns early when ctx ends.
func (s *shared) share(ctx context.Context, ask func()) {
	s.mu.Lock()
	if done := s.done; done != nil {
		s.mu.Unlock()
		select {
		case <-done:
		case <-ctx.Done():
		}
		return
	}
	s.done = make(chan struct{})
	pause := time.Until(s.began.Add(shareEvery))
	s.mu.Unlock()
	select {
	case <-time.After(pause):
	case <-ctx.Done():
	}
	began := time.Now()
	ask()
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.done)
	s.began, s.done = began, nil
}

// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"sync"
	"time"
)

// sharedInterval is the minimum time between two shared calls to the kubelet. With one call in each sharedInterval, the daemon uses one
// tenth of the kubelet's rate limit.
const sharedInterval = 100 * time.Millisecond

// sharedCall is a call to the kubelet that one goroutine makes for all goroutines that wait for the result.
type sharedCall struct {
	mu    sync.Mutex
	began time.Time     // start of the last call
	done  chan struct{} // closed when the current call ends; nil if there is none
}

// beginCall reports whether the caller itself must make the shared call. If the result is true, the caller must run endCall() after the
// call. If another goroutine is already making the call, beginCall waits until that call ends, and returns false. beginCall also waits
// until sharedInterval has passed since the last call. beginCall returns early if ctx ends.
func (s *sharedCall) beginCall(ctx context.Context) bool {
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

// endCall ends a shared call and wakes all goroutines that wait for it.
func (s *sharedCall) endCall() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.done)
	s.done = nil
}

// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"os"
	"os/signal"
	"syscall"
)

// DeferSignals lets the CNI operation finish after a signal: until then only SIGKILL and SIGABRT end the process. A DEL just continues; an
// ADD, which lasts only milliseconds, is undone at its end. It starts two threads, which costs time, so a plugin with the field
// DefersSignals calls it itself, and only if it is about to change something.
func (r *Request) DeferSignals() {
	r.DeferSignalsSoon()
	if r.listening != nil {
		<-r.listening
	}
}

// DeferSignalsSoon is DeferSignals in the background, because installing the handlers takes some hundred microseconds.
func (r *Request) DeferSignalsSoon() {
	if r.listen != nil && r.listening == nil {
		r.listening = make(chan struct{})
		go func() {
			defer close(r.listening)
			r.end = r.listen()
		}()
	}
}

// listenSignals returns a channel with the signals that ask the process to end. Child processes do not inherit the handlers, so a signal
// ends them as usual.
func listenSignals() <-chan os.Signal {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // a write to stdout then fails instead of ending the process
	return end
}

// interrupted returns an error if a signal has asked the process to end.
func (r *Request) interrupted() error {
	select {
	case <-r.listening:
	default:
		return nil
	}
	select {
	case s := <-r.end:
		return Errorf(CodeTryAgain, "%v arrived during ADD, so the attachment was removed again", s)
	default:
		return nil
	}
}

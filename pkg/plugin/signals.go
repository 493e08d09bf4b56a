// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"os"
	"os/signal"
	"syscall"
)

// Patient lets no signal but SIGKILL end the process in the middle from now on. DEL finishes; ADD does too, in its few milliseconds, and is
// then taken back. A plugin that is Late calls it before its first change: it costs two threads.
func (r *Request) Patient() {
	r.PatientSoon()
	if r.listening != nil {
		<-r.listening
	}
}

// PatientSoon begins what Patient waits for: the threads of the runtime need some hundred microseconds to agree on the signals.
func (r *Request) PatientSoon() {
	if r.listen != nil && r.listening == nil {
		r.listening = make(chan struct{})
		go func() {
			defer close(r.listening)
			r.end = r.listen()
		}()
	}
}

// listen returns the signals that ask the process to end. Handlers are not inherited: a program that the plugin runs ends as it would.
func listen() <-chan os.Signal {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // a write to stdout fails then, instead of ending the process
	return end
}

// interrupted tells of the signal that asked the process to end.
func (r *Request) interrupted() error {
	select {
	case <-r.listening:
	default:
		return nil
	}
	select {
	case s := <-r.end:
		return Errorf(CodeTryAgain, "%v came meanwhile, so the attachment was taken back", s)
	default:
		return nil
	}
}

// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"os"
	"os/signal"
	"syscall"
)

// Patient makes the process ignore signals, except SIGKILL, until the verb ends. DEL finishes. ADD finishes within milliseconds and is then
// undone. A plugin with CallsPatient calls Patient before its first change, because Patient costs two threads.
func (r *Request) Patient() {
	r.PatientSoon()
	if r.listening != nil {
		<-r.listening
	}
}

// PatientSoon starts the work of Patient in the background: the threads of the Go runtime need some hundred microseconds for it.
func (r *Request) PatientSoon() {
	if r.listen != nil && r.listening == nil {
		r.listening = make(chan struct{})
		go func() {
			defer close(r.listening)
			r.end = r.listen()
		}()
	}
}

// listen returns the channel of signals that request the end of the process. Child processes do not inherit the handlers, so signals end
// them as usual.
func listen() <-chan os.Signal {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // a write to stdout then fails instead of ending the process
	return end
}

// interrupted returns an error if a signal requested the end of the process.
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

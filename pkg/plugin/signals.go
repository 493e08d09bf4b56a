// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"os"
	"os/signal"
	"syscall"
)

// Patient prevents signals other than SIGKILL from ending the process before the verb ends. After a signal, DEL continues to its end. ADD
// also continues to its end, because it takes only milliseconds. The plugin then undoes the ADD. A plugin with the field CallsPatient calls
// Patient only before its first change, because Patient starts two threads.
func (r *Request) Patient() {
	r.PatientSoon()
	if r.listening != nil {
		<-r.listening
	}
}

// PatientSoon installs the signal handlers of Patient in the background, because the installation takes some hundred microseconds.
func (r *Request) PatientSoon() {
	if r.listen != nil && r.listening == nil {
		r.listening = make(chan struct{})
		go func() {
			defer close(r.listening)
			r.end = r.listen()
		}()
	}
}

// listenSignals installs signal handlers and returns a channel of the signals that request the end of the process. Child processes do not
// inherit the handlers, so that signals end them as usual.
func listenSignals() <-chan os.Signal {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // a write to stdout then fails instead of ending the process
	return end
}

// interrupted() returns an error if a signal requested the end of the process.
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

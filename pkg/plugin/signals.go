// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"os"
	"os/signal"
	"syscall"
)

// DeferSignals lets the CNI operation finish after a signal: before the operation ends, only SIGKILL can end the process. After a signal, a
// DEL still continues to its end. After a signal, an ADD also continues to its end, because an ADD lasts only milliseconds. When the ADD
// has ended, the plugin undoes its changes. DeferSignals starts two threads, which costs time. A plugin with the field DefersSignals
// therefore calls DeferSignals itself, and only if it is about to change something.
func (r *Request) DeferSignals() {
	r.DeferSignalsSoon()
	if r.listening != nil {
		<-r.listening
	}
}

// DeferSignalsSoon installs the signal handlers of DeferSignals in the background, because the installation takes some hundred
// microseconds.
func (r *Request) DeferSignalsSoon() {
	if r.listen != nil && r.listening == nil {
		r.listening = make(chan struct{})
		go func() {
			defer close(r.listening)
			r.end = r.listen()
		}()
	}
}

// listenSignals installs handlers for the signals that ask the process to end. The returned channel receives these signals. Child processes
// do not inherit the signal handlers, so a signal ends a child process as usual.
func listenSignals() <-chan os.Signal {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // a write to stdout then fails instead of ending the process
	return end
}

// interrupted() returns an error if a signal has asked the process to end.
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

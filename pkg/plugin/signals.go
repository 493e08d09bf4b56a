// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"os"
	"os/signal"
	"syscall"
)

// patient returns the plugin in a form that no signal but SIGKILL ends in the middle. DEL finishes; ADD does too, in its few milliseconds,
// and is then taken back. Handlers are not inherited: a program that the plugin runs ends as it would.
func (p Plugin) patient() Plugin {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // a write to stdout fails then, instead of ending the process
	p.end = end
	return p
}

// interrupted tells of the signal that asked the process to end.
func (p Plugin) interrupted() error {
	select {
	case s := <-p.end:
		return Errorf(CodeTryAgain, "%v came meanwhile, so the attachment was taken back", s)
	default:
		return nil
	}
}

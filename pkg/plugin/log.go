// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// logging are the keys for the log that every plugin has. sriov-cni has the same keys.
type logging struct {
	LogLevel string `json:"logLevel"`
	LogFile  string `json:"logFile"`
}

// toJournal is the logFile that stands for journald.
const toJournal = "journal"

// levelOf returns a level by its name in the configuration.
func levelOf(name string) (slog.Level, bool) {
	switch name {
	case "", "info":
		return slog.LevelInfo, true
	case "debug":
		return slog.LevelDebug, true
	case "warning":
		return slog.LevelWarn, true
	case "error", "panic":
		return slog.LevelError, true
	}
	return slog.LevelInfo, false
}

// check returns the error of a wrong value.
func (l logging) check() error {
	if _, ok := levelOf(l.LogLevel); !ok {
		return Errorf(CodeConfig, "logLevel %s: want debug, info, warning, error or panic", quote(l.LogLevel))
	}
	if l.LogFile != "" && l.LogFile != toJournal && !filepath.IsAbs(l.LogFile) {
		return Errorf(CodeConfig, "logFile %s: want an absolute path, or journal", quote(l.LogFile))
	}
	return nil
}

// CheckLogging returns the error of the keys for the log in a plugin's configuration.
func CheckLogging(config []byte) error {
	var l logging
	if err := decode(config, &l); err != nil {
		return err
	}
	return l.check()
}

// openLog makes the request log as the configuration says. Without the keys it opens nothing. A log that cannot be opened does not fail the
// verb. DEL and GC ignore wrong values, because they clean up for a configuration that may have changed.
func (r *Request) openLog() error {
	r.Log = r.logger()
	var to logging
	err := decode(r.Config, &to) // on an error it still reads the other key
	if err == nil {
		err = to.check()
	}
	if err != nil && r.Verb != "DEL" && r.Verb != "GC" {
		return err
	}
	level, _ := levelOf(to.LogLevel)
	if r.level != slog.LevelDebug { // PODLACE_LOG=debug overrides the level
		r.level = level
	}
	switch {
	case to == (logging{}):
		return nil
	case to.LogFile == toJournal:
		err = r.logToJournal()
	case filepath.IsAbs(to.LogFile):
		err = r.logToFile(to.LogFile)
	default: // stderr, also for a path that check refuses
		err = nil
	}
	r.Log = r.logger()
	if err != nil {
		r.Log.Warn("cannot write to logFile", "error", err)
	}
	return nil
}

// logToFile redirects the log to a file, which it creates if necessary.
func (r *Request) logToFile(path string) error {
	// O_NONBLOCK: a FIFO must not block. Other non-regular files are refused, since the result may go there, too.
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		f.Close()
		return errors.Join(err, fmt.Errorf("%s is no regular file", path))
	}
	r.logTo, r.log = f, f
	return nil
}

// logToJournal redirects the log to journald.
func (r *Request) logToJournal() error {
	j, err := openJournal()
	if err != nil {
		return err
	}
	r.logTo, r.journal = j, j
	return nil
}

// redirected reports whether the log goes to a file or to journald instead of stderr.
func (r *Request) redirected() bool { return r.logTo != nil }

func (r *Request) logger() *slog.Logger {
	if r.journal != nil {
		return slog.New(r.journal.handler(r))
	}
	who := []any{"plugin", r.Plugin, "verb", printable(r.Verb, 20)}
	if id := r.identity(); id != "" {
		who = append(who, "attachment", id)
	}
	if r.trace.id != "" {
		who = append(who, "trace_id", r.trace.id, "span_id", r.trace.span)
	}
	return slog.New(slog.NewTextHandler(PlainWriter(r.log), &slog.HandlerOptions{Level: r.level})).With(who...)
}

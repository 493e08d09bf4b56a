// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// logConfig has the log keys, which every plugin and also sriov-cni supports.
type logConfig struct {
	LogLevel string `json:"logLevel"`
	LogFile  string `json:"logFile"`
}

// toJournal is the value of logFile that selects journald.
const toJournal = "journal"

// levelOf returns the slog level for a level name in the configuration.
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

// readLogConfig returns an error if logLevel or logFile has an invalid value, but still the other key.
func readLogConfig(config []byte) (l logConfig, err error) {
	if err := Decode(config, &l); err != nil {
		return l, err
	}
	if _, ok := levelOf(l.LogLevel); !ok {
		return l, KeyErrorf("logLevel", "logLevel %s: want debug, info, warning, error or panic", quote(l.LogLevel))
	}
	if l.LogFile != "" && l.LogFile != toJournal && !filepath.IsAbs(l.LogFile) {
		return l, KeyErrorf("logFile", "logFile %s: want an absolute path, or journal", quote(l.LogFile))
	}
	return l, nil
}

// CheckLogging returns an error if logLevel or logFile in a plugin's configuration is invalid.
func CheckLogging(config []byte) error {
	_, err := readLogConfig(config)
	return err
}

// openLog configures the log by logLevel and logFile; without both, it opens no file and no connection. If the log file cannot be opened,
// it warns and the plugin continues. DEL and GC ignore invalid values, because the cleanup must work with a changed configuration.
func (r *Request) openLog() error {
	r.Log = r.logger()
	to, err := readLogConfig(r.Config)
	if err != nil && r.Verb != "DEL" && r.Verb != "GC" {
		return err
	}
	level, _ := levelOf(to.LogLevel)
	if r.level != slog.LevelDebug { // PODLACE_LOG=debug overrides the level
		r.level = level
	}
	switch {
	case to == (logConfig{}):
		return nil
	case to.LogFile == toJournal:
		if r.journal, err = openJournal(); err == nil {
			r.logTo = r.journal
		}
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

// logToFile redirects the log to a file, which it creates if missing.
func (r *Request) logToFile(path string) error {
	// With O_NONBLOCK, opening a FIFO does not block. Only a regular file will do: the path could be /dev/stdout, but stdout is for the result
	// alone.
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		f.Close()
		return errors.Join(err, fmt.Errorf("%s is no regular file", path))
	}
	r.logTo, r.log = f, orStderr{f, r.log}
	return nil
}

// orStderr writes to stderr what the log file does not take, for example because the disk is full.
type orStderr struct{ file, stderr io.Writer }

func (o orStderr) Write(line []byte) (int, error) {
	if _, err := o.file.Write(line); err != nil {
		_, err = fmt.Fprintf(PlainWriter(o.stderr), "%s (logFile: %v)\n", bytes.TrimSpace(line), err)
		return len(line), err
	}
	return len(line), nil
}

func (r *Request) logger() *slog.Logger {
	if r.journal != nil {
		return slog.New(r.journal.newHandler(r))
	}
	who := []any{"plugin", r.Plugin, "verb", Plain(r.Verb, 20)}
	if id := r.identity(); id != "" {
		who = append(who, "attachment", id)
	}
	if r.trace.id != "" {
		who = append(who, "trace_id", r.trace.id, "span_id", r.trace.span)
	}
	return slog.New(slog.NewTextHandler(PlainWriter(r.log), &slog.HandlerOptions{Level: r.level})).With(who...)
}

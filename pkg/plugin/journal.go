// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// journalSocket is the socket of journald (systemd, "Native Journal Protocol"). A log message is one datagram with a line NAME=value for
// each field.
const journalSocket = "/run/systemd/journal/socket"

// maxField is the maximum size of a field in bytes, with which a message always fits into a datagram.
const maxField = 16 << 10

// journal is a connection to journald.
type journal struct{ fd int }

// openJournal connects to journald. Sending a message to it never blocks.
func openJournal() (*journal, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: journalSocket}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("connect to journald at %s: %w", journalSocket, err)
	}
	return &journal{fd}, nil
}

// Close closes the socket to journald.
func (j *journal) Close() error { return unix.Close(j.fd) }

// newHandler returns the slog handler of a request. Messages have fields of systemd.journal-fields(7), and PODLACE_ fields that describe
// the attachment.
func (j *journal) newHandler(r *Request) slog.Handler {
	h := journalHandler{fd: j.fd, level: r.level, stderr: r.log}
	h.addField("SYSLOG_IDENTIFIER", "podlace")
	for _, f := range [][2]string{{"PODLACE_PLUGIN", r.Plugin}, {"PODLACE_VERB", r.Verb}, {"PODLACE_NETWORK", r.Network},
		{"PODLACE_POD", r.Pod.String()}, {"PODLACE_CONTAINER", r.ContainerID}, {"PODLACE_IFNAME", r.IfName}, {"PODLACE_NETNS", r.NetnsPath},
		{"TRACE_ID", r.trace.id}, {"SPAN_ID", r.trace.span}} {
		if f[1] != "" {
			h.addField(f[0], f[1])
		}
	}
	h.prefix = r.Plugin + " " + Plain(strings.ToLower(r.Verb), 20) + ": "
	return h
}

type journalHandler struct {
	fd     int
	level  slog.Level
	prefix string    // of each message
	suffix string    // of each message: the attributes of With
	fields []byte    // encoded
	stderr io.Writer // gets what journald does not take
}

// Enabled reports whether messages of a level are logged.
func (h journalHandler) Enabled(_ context.Context, level slog.Level) bool { return level >= h.level }

// Handle sends a log message to journald as one datagram. Attributes are also added to the text, which is all that journalctl shows by
// default.
func (h journalHandler) Handle(_ context.Context, record slog.Record) error {
	record.Attrs(func(a slog.Attr) bool {
		h.addAttribute(a)
		return true
	})
	text := h.prefix + record.Message + h.suffix
	priorities := map[slog.Level]string{slog.LevelError: "3", slog.LevelWarn: "4", slog.LevelInfo: "6", slog.LevelDebug: "7"} // of syslog(3)
	h.addField("PRIORITY", priorities[record.Level])
	h.addField("MESSAGE", text)
	if err := unix.Send(h.fd, h.fields, unix.MSG_NOSIGNAL); err != nil {
		_, err = fmt.Fprintf(PlainWriter(h.stderr), "%s (journald: %v)\n", text, err)
		return err
	}
	return nil
}

// WithAttrs returns a handler that adds attributes to each log message.
func (h journalHandler) WithAttrs(attributes []slog.Attr) slog.Handler {
	for _, a := range attributes {
		h.addAttribute(a)
	}
	return h
}

// WithGroup returns the handler unchanged, because the plugins do not use groups.
func (h journalHandler) WithGroup(string) slog.Handler { return h }

// addAttribute adds an attribute of a log message to the text and to the fields.
func (h *journalHandler) addAttribute(a slog.Attr) {
	value := a.Value.Resolve().String()
	h.suffix += fmt.Sprintf(" %s=%q", a.Key, value)
	h.addField("PODLACE_"+strings.ToUpper(a.Key), value)
}

// addField adds a field to a copy of the list, which several handlers share.
func (h *journalHandler) addField(name, value string) {
	line := name + "=" + Plain(strings.ReplaceAll(value, "\n", " "), maxField) + "\n"
	h.fields = append(bytes.Clone(h.fields), line...)
}

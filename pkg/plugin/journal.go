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

// journalSocket receives log messages (systemd, "Native Journal Protocol"): one datagram for each, with a line NAME=value for each field.
const journalSocket = "/run/systemd/journal/socket"

// maxField limits a field, so that a message fits in a datagram.
const maxField = 16 << 10

// journal is a connection to journald.
type journal struct{ fd int }

// openJournal connects to journald. Sending never blocks.
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

// Close closes the socket.
func (j *journal) Close() error { return unix.Close(j.fd) }

// handler returns the slog handler of a request. Its fields are those of systemd.journal-fields(7), and PODLACE_* for the attachment.
func (j *journal) handler(r *Request) slog.Handler {
	h := journalHandler{fd: j.fd, level: r.level, stderr: r.log}
	h.add("SYSLOG_IDENTIFIER", "podlace")
	for _, f := range [][2]string{{"PODLACE_PLUGIN", r.Plugin}, {"PODLACE_VERB", r.Verb}, {"PODLACE_NETWORK", r.Network},
		{"PODLACE_POD", r.Pod.String()}, {"PODLACE_CONTAINER", r.ContainerID}, {"PODLACE_IFNAME", r.IfName}, {"PODLACE_NETNS", r.NetnsPath},
		{"TRACE_ID", r.trace.id}, {"SPAN_ID", r.trace.span}} {
		if f[1] != "" {
			h.add(f[0], f[1])
		}
	}
	h.prefix = r.Plugin + " " + printable(strings.ToLower(r.Verb), 20) + ": "
	return h
}

// journalHandler sends each log message as one datagram.
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

// Handle sends a message. Its attributes are in the text, too, because journalctl shows the text alone.
func (h journalHandler) Handle(_ context.Context, record slog.Record) error {
	record.Attrs(func(a slog.Attr) bool {
		h.attribute(a)
		return true
	})
	text := h.prefix + record.Message + h.suffix
	h.add("PRIORITY", priority(record.Level))
	h.add("MESSAGE", text)
	if err := unix.Send(h.fd, h.fields, unix.MSG_NOSIGNAL); err != nil {
		_, err = fmt.Fprintf(PlainWriter(h.stderr), "%s (journald: %v)\n", text, err)
		return err
	}
	return nil
}

// WithAttrs returns a handler that adds attributes to each message.
func (h journalHandler) WithAttrs(attributes []slog.Attr) slog.Handler {
	for _, a := range attributes {
		h.attribute(a)
	}
	return h
}

// WithGroup returns the handler itself: the plugins have no groups.
func (h journalHandler) WithGroup(string) slog.Handler { return h }

// attribute adds an attribute to the text and to the fields.
func (h *journalHandler) attribute(a slog.Attr) {
	value := a.Value.Resolve().String()
	h.suffix += fmt.Sprintf(" %s=%q", a.Key, value)
	h.add("PODLACE_"+fieldName(a.Key), value)
}

// add adds a field. It copies the fields, which handlers share.
func (h *journalHandler) add(name, value string) {
	line := name + "=" + printable(value, maxField) + "\n"
	h.fields = append(bytes.Clone(h.fields), line...)
}

// fieldName returns the name of a field for a key: upper case letters, digits and underscores.
func fieldName(key string) string {
	return strings.Map(func(c rune) rune {
		switch {
		case c >= 'a' && c <= 'z':
			return c - 'a' + 'A'
		case c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
			return c
		}
		return '_'
	}, key)
}

// priority returns the priority of syslog(3).
func priority(level slog.Level) string {
	switch {
	case level >= slog.LevelError:
		return "3"
	case level >= slog.LevelWarn:
		return "4"
	case level >= slog.LevelInfo:
		return "6"
	}
	return "7"
}

// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf16"
)

// Plain makes an external text, such as the name of a pod, safe for a terminal and a log line: it replaces all but printable ASCII by '?',
// and truncates the text to most characters.
func Plain(text string, most int) string {
	var b strings.Builder
	for _, r := range text {
		if b.Len() == most {
			break
		}
		if r < ' ' || r > '~' {
			r = '?'
		}
		b.WriteRune(r)
	}
	return b.String()
}

// PlainRune returns '?' for a character that a terminal interprets or does not show, and others unchanged. It replaces control, format,
// surrogate, private and unassigned characters; format ones can change the direction of the text.
func PlainRune(r rune) rune {
	if strconv.IsPrint(r) {
		return r
	}
	return '?'
}

// PlainWriter returns a writer that applies PlainRune to each character except newlines and tabs, and writes the text to w.
func PlainWriter(w io.Writer) io.Writer { return plainWriter{w} }

type plainWriter struct{ w io.Writer }

// Write writes the whole text in one call of the underlying writer.
func (p plainWriter) Write(text []byte) (int, error) {
	_, err := p.w.Write(bytes.Map(func(r rune) rune {
		if r == '\n' || r == '\t' {
			return r
		}
		return PlainRune(r)
	}, text))
	return len(text), err
}

// PlainJSON escapes the characters in a JSON document that PlainRune would replace. Its values do not change.
func PlainJSON(document []byte) []byte {
	var b bytes.Buffer
	for _, r := range string(document) {
		if r == '\n' || r == '\t' || r == PlainRune(r) {
			b.WriteRune(r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			fmt.Fprintf(&b, `\u%04x`, unit)
		}
	}
	return b.Bytes()
}

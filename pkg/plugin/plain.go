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

// Plain makes a text safe for a terminal, because a pod's name may contain anything. It replaces characters other than printable ASCII by
// '?', and truncates to most characters.
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

// PlainRune returns '?' for a character that a terminal interprets or hides: control and format characters, such as those that change the
// text direction, surrogates, private and unassigned characters.
func PlainRune(r rune) rune {
	if strconv.IsPrint(r) {
		return r
	}
	return '?'
}

// PlainWriter returns a writer to w for logs and texts of lines. It applies PlainRune to each character except newlines and tabs.
func PlainWriter(w io.Writer) io.Writer { return plainWriter{w} }

type plainWriter struct{ w io.Writer }

// Write writes the text in one call.
func (p plainWriter) Write(text []byte) (int, error) {
	_, err := p.w.Write(bytes.Map(func(r rune) rune {
		if r == '\n' || r == '\t' {
			return r
		}
		return PlainRune(r)
	}, text))
	return len(text), err
}

// PlainJSON escapes the characters of a JSON document that PlainRune replaces. The document keeps its meaning.
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

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

// Plain makes a text fit for a terminal: a pod's name may hold anything. What is no printable ASCII becomes '?', and the rest beyond most
// characters is cut.
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

// PlainRune returns '?' for a character that a terminal obeys or hides: a control or format character, such as one that turns the
// direction of the text, a surrogate, a private or an unassigned one.
func PlainRune(r rune) rune {
	if strconv.IsPrint(r) {
		return r
	}
	return '?'
}

// PlainWriter returns a writer to w for logs and texts of lines: each character passes PlainRune, except newlines and tabs.
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

// PlainJSON escapes the characters of a JSON document that PlainRune replaces. The document means the same.
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

// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// For all characters, PlainJSON keeps the value of a text, and no output contains one that a terminal interprets or does not show.
func TestPlainRunes(t *testing.T) {
	var all strings.Builder
	hidden := 0
	for r := range unicode.MaxRune + 1 {
		if !utf8.ValidRune(r) { // half of a surrogate pair, which cannot occur in a string
			continue
		}
		all.WriteRune(r)
		if unicode.In(r, unicode.Cc, unicode.Cf, unicode.Co, unicode.Zl, unicode.Zp) {
			hidden++
			if PlainRune(r) != '?' {
				t.Errorf("%U passes", r)
			}
		}
	}
	if hidden < 100_000 {
		t.Errorf("only %d characters are hidden ones: the private ones alone are more", hidden)
	}
	document, err := json.Marshal(all.String())
	if err != nil {
		t.Fatal(err)
	}
	plain, back := PlainJSON(document), ""
	if err := json.Unmarshal(plain, &back); err != nil || back != all.String() {
		t.Errorf("%d bytes become %d, %v", all.Len(), len(back), err)
	}
	mustPrint(t, plain)
	var log bytes.Buffer
	to := slog.New(slog.NewTextHandler(PlainWriter(&log), nil))
	to.Info("m"+all.String(), "k"+all.String(), "v"+all.String())
	to.Info("\x7f", "\x7f", "\x7f") // slog does not quote this character
	mustPrint(t, bytes.ReplaceAll(log.Bytes(), []byte("\n"), nil))
}

func mustPrint(t *testing.T, text []byte) {
	t.Helper()
	for _, r := range string(text) {
		if !strconv.IsPrint(r) {
			t.Fatalf("%U is printed", r)
		}
	}
}

// PlainWriter keeps newlines and tabs, and replaces special characters and invalid UTF-8.
func TestPlainWriter(t *testing.T) {
	var b bytes.Buffer
	const text = "a\tb\nc\x1b[2J\x7f\u009b\u202eé\xff\x9b\r\n"
	if n, err := PlainWriter(&b).Write([]byte(text)); n != len(text) || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if want := "a\tb\nc?[2J???é\ufffd\ufffd?\n"; b.String() != want {
		t.Errorf("got %q, want %q", b.String(), want)
	}
	if got, want := string(PlainJSON([]byte("{\n\t\"a\": \"\u202e\U000e0001\"}"))), "{\n\t\"a\": \"\\u202e\\udb40\\udc01\"}"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

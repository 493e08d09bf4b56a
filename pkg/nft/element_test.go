// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"encoding/hex"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// FuzzElement encodes and parses an element, which must not change it, and parses any message without a panic.
func FuzzElement(f *testing.F) {
	f.Add([]byte("key0"), []byte("value000"), "aaaa shop/web-0", []byte{})
	f.Add([]byte("key0"), []byte{}, "", []byte("\x02\x00\x00\x00"))
	broken, _ := hex.DecodeString("0200000008000300000400ff")
	f.Add([]byte("x"), []byte("y"), "\xff\x00", broken)
	f.Fuzz(func(t *testing.T, key, value []byte, comment string, answer []byte) {
		_ = parseElements(answer)
		if len(key) == 0 || len(key) > 64 || len(value) > 64 || len(comment) > MaxComment || len(comment) > 0 && comment[len(comment)-1] == 0 {
			return
		}
		want := Element{Key: key, Comment: comment}
		if len(value) > 0 {
			want.Value = value
		}
		msg, err := (&Handle{Table: "t"}).message(0, 0, "s", []Element{want})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]Element{want}, parseElements(msg.Data)); diff != "" {
			t.Fatal(diff)
		}
	})
}

func FuzzChain(f *testing.F) {
	f.Add([]byte("\x02\x00\x00\x00\x08\x00\x05\x00\x00\x00\x00\x01"))
	f.Add([]byte{})
	f.Fuzz(func(_ *testing.T, answer []byte) { _ = parseChain(answer) })
}

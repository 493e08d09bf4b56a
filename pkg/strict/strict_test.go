// SPDX-License-Identifier: Apache-2.0

package strict

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestPlaces(t *testing.T) {
	const text = "\n{\"é\": 1, \"list\": [\n  {\"a\": true,\n\t\"a\": null}, \"x\"], \"b c\":{}, \"\\n\": 2, \"d\":[]}\n"
	root, ok := (&Report{File: "f"}).ParseJSON([]byte(text))
	var got []string
	root.Walk(func(v *Value) { got = append(got, fmt.Sprint(v.Where(), " = ", v)) })
	want := []string{`f:2:2: "\u00e9" = 1`, "f:2:10: list = a list", "f:3:3: list[0] = an object", "f:3:4: list[0].a = true",
		"f:4:2: list[0].a = null", `f:4:14: list[1] = "x"`, "f:4:20: b c = an object", `f:4:30: "\n" = 2`, "f:4:39: d = a list"}
	if diff := cmp.Diff(want, got); !ok || diff != "" {
		t.Error(diff)
	}
	for key, want := range map[string]string{"list[0].a": "f:4:2: list[0].a", "list[0].b.c": "f:3:3: list[0].b.c",
		Under("", "é"): `f:2:2: "\u00e9"`,
		"lis":          "f:1:1: lis", "": "f:1:1"} {
		if got := root.At(key).Where(); got != want {
			t.Errorf("%s: got %s, want %s", key, got, want)
		}
	}
}

// The time of ParseJSON is proportional to the size of the text.
func TestPlacesOfLargeText(t *testing.T) {
	const keys, patience = 30_000, 10 * time.Second
	var text strings.Builder
	text.WriteString("{\n\"first\": \"é\", ")
	for i := range keys {
		fmt.Fprintf(&text, `"k%06d": 0, `, i)
	}
	text.WriteString("\n \"last\": 0}")
	began := time.Now()
	root, _ := (&Report{File: "f"}).ParseJSON([]byte(text.String()))
	if took := time.Since(began); took > patience {
		t.Errorf("%d bytes took %s", text.Len(), took)
	}
	object := root.Data.(Object)
	for i, want := range map[int]string{0: "f:2:1: first", 1: "f:2:15: k000000", 2: "f:2:29: k000001", keys + 1: "f:3:2: last"} {
		if got := object[i].Where(); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

// A syntax error has its position and an advice.
func TestSyntax(t *testing.T) {
	const advice = "; put commas between keys but not after the last, and quotes around keys and strings"
	const ends = "the text ends here: a }, a ] or a quote is missing"
	for text, want := range map[string]string{
		"":                   "f:1:1: the text is empty: want JSON",
		"\n ":                "f:2:2: the text is empty: want JSON",
		"{\n\"a\": 1":        "f:2:7: " + ends,
		"{\n\n":              "f:3:1: " + ends,
		"{\"é\": 1,\n}":      "f:2:1: no JSON: invalid character '}' looking for beginning of object key string" + advice,
		"{a: 1}":             "f:1:2: no JSON: invalid character 'a' looking for beginning of object key string" + advice,
		"{}\n{}":             "f:2:1: no JSON: invalid character '{' after top-level value",
		"\xef\xbb\xbf{}":     "f:1:1: the file begins with a byte order mark (BOM): save it as UTF-8 without one",
		nested(MaxDepth + 1): "f:1:101: nested more than 100 levels deep",
	} {
		r := Report{File: "f"}
		if _, ok := r.ParseJSON([]byte(text)); ok || r.Err() == nil || r.Err().Error() != want {
			t.Errorf("%.40q: got %v, want %s", text, r.Err(), want)
		}
	}
	if _, ok := (&Report{}).ParseJSON([]byte(nested(MaxDepth))); !ok {
		t.Errorf("%d levels were refused", MaxDepth)
	}
}

func nested(levels int) string { return strings.Repeat("[", levels) + strings.Repeat("]", levels) }

// example is what a reader makes of an object.
type example struct {
	On     bool
	Number int
	Word   string
	List   []string
	Any    map[string]string
}

func (e *example) read(r *Report, v Value) {
	keys := r.Object(v, Fields{
		"on":      r.Bool(&e.On),
		"number":  To(r, &e.Number, Between(1, 9)),
		"word":    To(r, &e.Word, OneOf("red", "blue")),
		"entries": ListTo(r, &e.List, func(s string) (string, error) { return strings.ToUpper(s), nil }),
		"any": r.Members(func(v Value) {
			var text string
			r.Text(&text)(v)
			e.Any[v.Name] = text
		}),
	}, Fields{"other": func(v Value) { r.Fail(v.Place, "belongs elsewhere") }})
	r.Require(v, keys, "number", ": want 1 to 9")
}

// A reader stores what is right, and reports every fault with its key.
func TestObject(t *testing.T) {
	for text, want := range map[string]string{
		`{"on": true, "number": 3, "word": "blue", "entries": ["a", "b"], "any": {"k": "v"}}`: "",
		`{"number": 1, "nmber": 2, "Word": "red", "xyz": 1}`: `f:1:15: nmber: unknown key; did you mean number?
f:1:27: Word: unknown key; did you mean word?
f:1:42: xyz: unknown key; known keys: any, entries, number, on, word`,
		"{\"number\": 1,\n\"number\": 2}": "f:2:1: number: duplicate key, first in line 1",
		`{"on": 1, "number": 1.5, "word": "grey", "entries": "a", "any": []}`: `f:1:2: on: 1: want true or false
f:1:11: number: 1.5: want a whole number between 1 and 9
f:1:26: word: "grey": want red, blue
f:1:42: entries: "a": want a list
f:1:58: any: a list: want an object`,
		`{"number": "1", "word": null, "entries": [1, "b", {}], "any": {"k": "v", "k": 1}}`: `f:1:2: number: "1": want a number
f:1:17: word: null: want a string
f:1:43: entries[0]: 1: want a string
f:1:51: entries[2]: an object: want a string
f:1:74: any.k: duplicate key, first in line 1`,
		`{"other": 1}`: "f:1:2: other: belongs elsewhere\nf:1:1: number is missing: want 1 to 9",
		`7`:            "f:1:1: 7: want an object",
	} {
		e, r := example{Any: map[string]string{}}, &Report{File: "f"}
		root, _ := r.ParseJSON([]byte(text))
		e.read(r, root)
		if err := r.Err(); want == "" && err != nil || want != "" && (err == nil || err.Error() != want) {
			t.Errorf("%s: got\n%v\nwant\n%s", text, err, want)
		}
		if wanted := (example{true, 3, "blue", []string{"A", "B"}, map[string]string{"k": "v"}}); want == "" && !cmp.Equal(wanted, e) {
			t.Error(cmp.Diff(wanted, e))
		}
	}
}

// In a lenient report, null and the case of keys do not matter, and an unusual spelling is noted.
func TestLenient(t *testing.T) {
	e, r := example{}, &Report{File: "f", Lenient: true}
	root, _ := r.ParseJSON([]byte(`{"NUMBER": 3, "Word": null, "on": true}`))
	if e.read(r, root); r.Err() != nil || e.Number != 3 || !e.On {
		t.Errorf("%v, %+v", r.Err(), e)
	}
	if want := []Problem{{Place{"f", 1, 2, "NUMBER"}, "read as number"}}; !cmp.Equal(want, r.Notes) {
		t.Error(cmp.Diff(want, r.Notes))
	}
}

// The error of a file has a limited number of lines.
func TestManyProblems(t *testing.T) {
	r := Report{File: "f"}
	for line := range 150 {
		r.Fail(Place{File: "f", Line: 150 - line, Column: 1}, "wrong")
	}
	lines := strings.Split(r.Err().Error(), "\n")
	if len(lines) != maxLines+1 || lines[0] != "f:1:1: wrong" || lines[maxLines] != "f: 50 more errors" {
		t.Errorf("%d lines: %s", len(lines), lines[len(lines)-1])
	}
}

func TestNearest(t *testing.T) {
	words := []string{"isGateway", "isDefaultGateway", "ipMasq", "ipMasqBackend", "mtu", "vlan"}
	for key, want := range map[string]string{
		"isGatway": "isGateway", "ISGATEWAY": "isGateway", "ipMask": "ipMasq", "ipmasqbackend": "ipMasqBackend", "mtuu": "mtu", "mut": "mtu",
		"vlanId": "vlan", "vlanIds": "", "siGatewya": "isGateway", "msGatwya": "", "somethingElse": "", "": "", "x": "", "mxx": "",
		"ipMasqq":                  "ipMasq",
		strings.Repeat("x", 1<<20): "",
	} {
		if got := Nearest(key, words); got != want {
			t.Errorf("%.40q: got %q, want %q", key, got, want)
		}
	}
	if got := Nearest("a", nil); got != "" {
		t.Errorf("of no words: %q", got)
	}
}

func TestWithin(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "ab", 2}, {"kitten", "sitten", 1}, {"kitten", "sittin", 2}, {"abc", "abc", 0}, {"ab", "ba", 1}, {"abcd", "badc", 2},
		{"abcabc", "abc", 3}, {"xabc", "abc", 1}} {
		for edits := range 4 {
			if got := within(c.a, c.b, edits); got != (edits >= c.want) || within(c.b, c.a, edits) != got {
				t.Errorf("%q and %q, %d edits: %t", c.a, c.b, edits, got)
			}
		}
	}
}

// FuzzParse checks that the places of any text are inside the text, and that ParseJSON accepts exactly valid JSON without deep nesting.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"", "{}", `{"a": [1, {"b": null}]}`, "[\n\n1,]", "{\"\\u0000\": 1}", nested(MaxDepth + 1)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r := Report{File: "f"}
		root, ok := r.ParseJSON([]byte(text))
		lines := strings.Count(text, "\n") + 1
		check := func(at Place) {
			if at.Line < 1 || at.Line > lines || at.Column < 1 || at.Column > len(text)+1 || strings.Contains(at.Key, "\n") {
				t.Errorf("%q: %+v", text, at)
			}
		}
		root.Walk(func(v *Value) { check(v.Place) })
		for _, p := range r.Problems {
			check(p.Place)
		}
		if ok != (len(r.Problems) == 0) || ok && !json.Valid([]byte(text)) {
			t.Errorf("%q: %v", text, r.Err())
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package strict

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Fields contains the keys of an object, with the functions that read their values.
type Fields map[string]func(Value)

const (
	// Others is the field of all keys that the other fields do not contain.
	Others = ""
	// Duplicate is the problem of a key that its object has already.
	Duplicate = "duplicate key"
)

// Object reads an object by calling the function of the field for each of its keys. It returns the places of the keys that it found, or nil
// if the value is no object. Foreign keys are accepted but not suggested.
func (r *Report) Object(v Value, fields Fields, foreign ...Fields) map[string]Place {
	object, ok := as[Object](r, v)
	if !ok {
		return nil
	}
	seen := map[string]Place{}
	for _, m := range object {
		key, read := r.find(append(foreign, fields), m.Name)
		if read == nil {
			read = fields[Others]
		} else if m.Data == nil && r.Lenient {
			read = func(Value) {}
		}
		switch first, again := seen[key]; {
		case read == nil:
			r.Fail(m.Place, "unknown key; %s", Hint(m.Name, slices.Sorted(maps.Keys(fields))))
		case again && r.File != "":
			r.Fail(m.Place, Duplicate+", first in line %d", first.Line)
		case again:
			r.Fail(m.Place, Duplicate)
		default:
			seen[key] = m.Place
			if m.Name != key && m.Name != strings.ToUpper(key[:1])+key[1:] { // Go programs without JSON tags write Key
				r.Note(m.Place, "read as %s", key)
			}
			read(m)
		}
	}
	return seen
}

// Require reports a key that an object lacks. places is the result of Object; hint, which may be "", follows the message.
func (r *Report) Require(v Value, places map[string]Place, key, hint string) {
	if _, ok := places[key]; !ok && places != nil {
		r.Fail(v.Place, "%s is missing%s", key, hint)
	}
}

// find returns the field that a key in the file means.
func (r *Report) find(all []Fields, name string) (key string, read func(Value)) {
	for _, fields := range all {
		for key, read := range fields {
			if key == name || r.Lenient && strings.EqualFold(key, name) {
				return key, read
			}
		}
	}
	return name, nil
}

// as returns the data of a value, or adds a problem if it has another type.
func as[J any](r *Report, v Value) (J, bool) {
	data, ok := v.Data.(J)
	if ok {
		return data, true
	}
	want := "an object"
	switch any(data).(type) {
	case bool:
		want = "true or false"
	case json.Number:
		want = "a number"
	case string:
		want = "a string"
		if _, ok := v.Data.(bool); ok {
			want = "a string in quotes, because YAML takes on, off, yes and no for booleans"
		}
	case List:
		want = "a list"
	}
	r.Fail(v.Place, "%s: want %s", v, want)
	return data, false
}

// To returns a function that reads a value of the JSON type J, which is bool, json.Number or string, and stores what convert makes of it.
func To[J, T any](r *Report, to *T, convert func(J) (T, error)) func(Value) {
	return func(v Value) {
		data, ok := as[J](r, v)
		if !ok {
			return
		}
		result, err := convert(data)
		if err != nil {
			r.Fail(v.Place, "%v", err)
			return
		}
		*to = result
	}
}

// Bool returns a function that reads true or false.
func (r *Report) Bool(to *bool) func(Value) {
	return To(r, to, func(b bool) (bool, error) { return b, nil })
}

// Each returns a function that reads a list and calls a function for each item.
func (r *Report) Each(item func(Value)) func(Value) {
	return func(v Value) {
		list, _ := as[List](r, v)
		for _, v := range list {
			item(v)
		}
	}
}

// Members returns a function that reads an object with any keys and calls a function for each member.
func (r *Report) Members(member func(Value)) func(Value) {
	return func(v Value) { r.Object(v, Fields{Others: member}) }
}

// Duplicates reports each key in v that its object has already.
func (r *Report) Duplicates(v Value) {
	check := func(v *Value) {
		if _, ok := v.Data.(Object); ok {
			r.Members(func(Value) {})(*v)
		}
	}
	check(&v)
	v.Walk(check)
}

// Text returns a function that reads any string.
func (r *Report) Text(to *string) func(Value) {
	return To(r, to, func(s string) (string, error) { return s, nil })
}

// ListTo returns a function that reads a list and appends what convert makes of each item, as in To.
func ListTo[J, T any](r *Report, to *[]T, convert func(J) (T, error)) func(Value) {
	return r.Each(func(v Value) {
		var item T
		before := len(r.Problems)
		if To(r, &item, convert)(v); len(r.Problems) == before {
			*to = append(*to, item)
		}
	})
}

// Between returns a function for To that accepts whole numbers within two bounds.
func Between(least, most int) func(json.Number) (int, error) {
	return func(text json.Number) (int, error) {
		n, err := strconv.Atoi(string(text))
		if err != nil || n < least || n > most {
			return 0, fmt.Errorf("%.40s: want a whole number between %d and %d", text, least, most)
		}
		return n, nil
	}
}

// OneOf returns a function for To that accepts the given texts.
func OneOf[T ~string](choices ...T) func(string) (T, error) {
	return func(text string) (T, error) {
		names := make([]string, len(choices))
		for i, c := range choices {
			if names[i] = string(c); names[i] == text {
				return c, nil
			}
		}
		return "", fmt.Errorf("%+.40q: want %s", text, strings.Join(names, ", "))
	}
}

// Hint returns what to write instead of an unknown key: the nearest of the known keys, or all of them.
func Hint(key string, known []string) string {
	if near := Nearest(key, known); near != "" {
		return fmt.Sprintf("did you mean %s?", near)
	}
	return "known keys: " + strings.Join(known, ", ")
}

// Nearest returns the word that differs least from a key, or "" if none is within two edits, or one for a key of up to four letters. An
// edit adds, removes or replaces a letter, or swaps two. Case does not matter.
func Nearest(key string, words []string) string {
	key = strings.ToLower(key)
	for edits := 0; edits <= 2 && edits <= max(1, len(key)-3); edits++ {
		for _, w := range words {
			if within(key, strings.ToLower(w), edits) {
				return w
			}
		}
	}
	return ""
}

// within reports whether a number of edits turns a into b. It takes linear time, because a key may have a million letters.
func within(a, b string, edits int) bool {
	for a != "" && b != "" && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	if edits == 0 || a == "" || b == "" {
		return len(a)+len(b) <= edits
	}
	swapped := len(a) > 1 && len(b) > 1 && a[0] == b[1] && a[1] == b[0]
	return within(a[1:], b, edits-1) || within(a, b[1:], edits-1) || within(a[1:], b[1:], edits-1) ||
		swapped && within(a[2:], b[2:], edits-1)
}

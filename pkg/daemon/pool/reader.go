// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
)

// The type reader converts JSON values into a configuration and collects all problems.
type reader struct {
	file     string
	problems []Problem
	notes    []Problem
	unserved []Problem // of the current resource
	more     int       // number of problems beyond maxProblems
}

func (r *reader) fail(at Place, format string, args ...any) {
	if len(r.problems) == maxProblems {
		r.more++
		return
	}
	r.problems = append(r.problems, Problem{at, fmt.Sprintf(format, args...)})
}

func (r *reader) note(at Place, format string, args ...any) {
	r.notes = append(r.notes, Problem{at, fmt.Sprintf(format, args...)})
}

func sortByLine(problems []Problem) {
	slices.SortStableFunc(problems, func(a, b Problem) int { return a.Line - b.Line })
}

// joinProblems returns an error with all problems, sorted by line, or nil if there are no problems.
func (r *reader) joinProblems() error {
	errs := make([]error, 0, len(r.problems)+1)
	sortByLine(r.problems)
	for _, p := range r.problems {
		errs = append(errs, p)
	}
	if r.more > 0 {
		errs = append(errs, fmt.Errorf("%s: %d more errors", r.file, r.more))
	}
	return errors.Join(errs...)
}

// A field is a key of an object, with the function that reads the value of the key.
type field struct {
	key  string
	read func(value)
}

// readObject reads an object. For each member of the object, readObject calls the function of the field with the same key. readObject
// returns the position of each key. Like encoding/json, readObject ignores null values, and does not distinguish upper and lower case in
// keys. Some files for the SR-IOV network device plugin may rely on this behaviour of encoding/json. The last arguments of readObject are
// keys that only other programs use. readObject accepts these keys, but does not suggest them in errors.
func (r *reader) readObject(v value, fields []field, foreign ...field) map[string]Place {
	seen := map[string]Place{}
	if !r.hasKind(v, object) {
		return seen
	}
	for _, m := range v.members {
		f, ok := find(slices.Concat(fields, foreign), m.key)
		if !ok {
			r.fail(m.value.Place, "unknown key%s", suggestion(m.key, fields))
			continue
		}
		if first, again := seen[f.key]; again {
			r.fail(m.value.Place, "duplicate key, first in line %d", first.Line)
			continue
		}
		seen[f.key] = m.value.Place
		if m.key != f.key && m.key != goName(f.key) {
			r.note(m.value.Place, "read as %s", f.key)
		}
		if m.value.kind != null {
			f.read(m.value)
		}
	}
	return seen
}

// goName returns the given key with its first letter in upper case. Go programs without JSON tags, such as the SR-IOV network operator,
// write keys with a capital first letter.
func goName(key string) string { return strings.ToUpper(key[:1]) + key[1:] }

// requireKey reports an error if an object does not have the key.
func (r *reader) requireKey(v value, keys map[string]Place, key string) {
	if _, ok := keys[key]; !ok && v.kind == object {
		r.fail(v.Place, "%s is missing", key)
	}
}

func find(fields []field, key string) (field, bool) {
	for _, f := range fields {
		if f.key == key {
			return f, true
		}
	}
	for _, f := range fields {
		if strings.EqualFold(f.key, key) {
			return f, true
		}
	}
	return field{}, false
}

// hasKind reports whether a value has the wanted JSON type. If the value has another type, hasKind adds a problem to the list of problems.
func (r *reader) hasKind(v value, want kind) bool {
	if v.kind == want {
		return true
	}
	found := string(v.kind)
	switch v.kind {
	case number:
		found = fmt.Sprintf("%.40s", v.text)
	case text:
		found = fmt.Sprintf("%+.40q", v.text)
	case boolean:
		found = strconv.FormatBool(v.yes)
	}
	r.fail(v.Place, "%s: want %s", found, want)
	return false
}

// readBoolean returns a function that reads a boolean.
func (r *reader) readBoolean(to *bool) func(value) {
	return func(v value) {
		if r.hasKind(v, boolean) {
			*to = v.yes
		}
	}
}

// readInteger reads a whole number between two bounds.
func (r *reader) readInteger(v value, least, most int) (int, bool) {
	if !r.hasKind(v, number) {
		return 0, false
	}
	n, err := strconv.Atoi(v.text)
	if err != nil || n < least || n > most {
		r.fail(v.Place, "%.40s: want a whole number between %d and %d", v.text, least, most)
		return 0, false
	}
	return n, true
}

// oneOf returns a function that reads a string and reports a problem if the string is not one of the choices.
func oneOf[T ~string](r *reader, to *T, choices ...T) func(value) {
	return func(v value) {
		if !r.hasKind(v, text) {
			return
		}
		names := make([]string, len(choices))
		for i, c := range choices {
			if names[i] = string(c); names[i] == v.text {
				*to = c
				return
			}
		}
		r.fail(v.Place, "%+.40q: want %s", v.text, strings.Join(names, ", "))
	}
}

// listOf returns a function that reads a list. For each item of the list, the returned function calls the given function.
func (r *reader) listOf(item func(value)) func(value) {
	return func(v value) {
		if !r.hasKind(v, list) {
			return
		}
		for _, i := range v.items {
			item(i)
		}
	}
}

// checkedString returns a function that reads a string, checks the string with the given function, and stores the result of the check.
func (r *reader) checkedString(to *string, check func(string) (string, error)) func(value) {
	return func(v value) {
		if !r.hasKind(v, text) {
			return
		}
		s, err := check(v.text)
		if err != nil {
			r.fail(v.Place, "%v", err)
			return
		}
		*to = s
	}
}

// stringList returns a function that reads a list of strings. Each string is checked in the same way as in checkedString.
func (r *reader) stringList(to *[]string, check func(string) (string, error)) func(value) {
	return r.listOf(func(v value) {
		before, s := len(r.problems), ""
		if r.checkedString(&s, check)(v); len(r.problems) == before {
			*to = append(*to, s)
		}
	})
}

// readAddress returns a function that reads a PCI address.
func (r *reader) readAddress(to *pci.Address) func(value) {
	return r.checkedString(new(string), func(s string) (_ string, err error) {
		*to, err = pci.ParseAddress(s)
		return s, err
	})
}

// suggestion() returns a hint for the error about an unknown key, such as the most similar known key.
func suggestion(key string, fields []field) string {
	_, selects := find((&reader{}).selectorKeys(&selector{}), key)
	if _, ok := find(fields, "selectors"); ok && selects {
		return "; it belongs in selectors"
	}
	var names []string
	for _, f := range fields {
		names = append(names, f.key)
	}
	if near := plugin.Nearest(key, names); near != "" {
		return fmt.Sprintf("; did you mean %s?", near)
	}
	return "; known keys: " + strings.Join(names, ", ")
}

// SPDX-License-Identifier: Apache-2.0

package yamlfile

import (
	"encoding/json"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/podlace/podlace/pkg/strict"
)

// Keys are merged as by kubectl, which also determines the duplicates.
func TestMerges(t *testing.T) {
	const anchors = "a: &a {k: 1, m: 2}\nb: &b {k: 3, o: 4}\n"
	for text, duplicates := range map[string]string{
		"c: {<<: *a}":                   "",
		"c: {<<: *a, k: 9}":             "",
		"c: {<<: [*a, *b]}":             "",
		"c: {<<: [*b, *a], o: 9}":       "",
		"c: {<<: [*a, {p: {<<: *b}}]}":  "",
		"c: {<<: []}":                   "",
		`c: {"<<": {k: 1}, k: 2}`:       "",
		"c: {k: 9, <<: *a}":             "f:1:8: c.<<.k: duplicate key, first in line 3",
		"c: {k: 9, p: 1, <<: [*b, *a]}": "f:2:8: c.<<[0].k: duplicate key, first in line 3",
		"c: {k: 9, <<: *a, k: 8}":       "f:3:19: c.k: duplicate key, first in line 3",
	} {
		documents, err := Read("f", []byte(anchors+text))
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		got, _ := json.Marshal(documents[0])
		if want, err := yaml.YAMLToJSON([]byte(anchors + text)); err != nil || string(got) != string(want) {
			t.Errorf("%s: got %s, want %s (%v)", text, got, want, err)
		}
		r := strict.Report{File: "f"}
		if r.Duplicates(documents[0]); strings.TrimSpace(r.Problems.Error()) != duplicates {
			t.Errorf("%s: got %q, want %q", text, r.Problems.Error(), duplicates)
		}
	}
}

// Booleans, numbers and texts are the same words as for kubectl.
func TestWords(t *testing.T) {
	for _, word := range strings.Fields("on On ON oN off Off OFF yes Yes YES no No NO y Y n N true TRUE tRUE 010 0b11 1_000 1:30 !!str|on 'yes' \"no\" no-way") {
		word = strings.ReplaceAll(word, "|", " ")
		for _, text := range []string{"a: " + word, word + ": 1", "- " + word, "a: &a " + word + "\nb: *a", "a: |\n  " + word} {
			documents, err := Read("f", []byte(text))
			if err != nil {
				t.Errorf("%s: %v", text, err)
				continue
			}
			got, _ := json.Marshal(documents[0])
			if want, err := yaml.YAMLToJSON([]byte(text)); err != nil || string(got) != string(want) {
				t.Errorf("%s: got %s, want %s (%v)", text, got, want, err)
			}
		}
	}
}

func TestRefused(t *testing.T) {
	nested := func(levels int) string { return strings.Repeat("[", levels) + strings.Repeat("]", levels) }
	for text, want := range map[string]string{
		nested(strict.MaxDepth):                 "",
		"a: 1\n---\nb:\n- " + nested(99) + "\n": "f:4:101: nested more than 100 levels deep",
		nested(strict.MaxDepth + 1):             "f:1:101: nested more than 100 levels deep",
		"a: &a {<<: *a}":                        "f:1:8: nested more than 100 levels deep",
		"a: 1\nb: {<<: [{c: 1}, 7]}":            "f:2:18: b.<<[1]: 7: want an object, or a list of objects",
		"a: 1\nb: {<<: 7, d: 1}":                "f:2:5: b.<<: 7: want an object, or a list of objects",
	} {
		if _, err := Read("f", []byte(text)); want == "" && err != nil || want != "" && (err == nil || err.Error() != want) {
			t.Errorf("%.40s: got %v, want %s", text, err, want)
		}
	}
}

// The path of a key leads back to it, whatever its letters are.
func TestPlaceOfKey(t *testing.T) {
	documents, err := Read("f", []byte("a:\n  ключ: [{é: 1}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	inner := documents[0].Get("a", "ключ").Items()[0].Get("é")
	if at := documents[0].At(strict.Under(strict.Under("a", "ключ")+"[0]", "é")); at != inner.Place || at.Line != 2 || at.Column != 11 {
		t.Errorf("got %v, want %v", at, inner.Place)
	}
}

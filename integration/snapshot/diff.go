// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Diff returns one line for each object that appeared, vanished or changed, so none for equal snapshots. It ignores a pod that is in only
// one of them.
func Diff(before, after *Snapshot) []string {
	lines := map[string]string{}
	for key, old := range before.records {
		now, there := after.records[key]
		switch {
		case !after.scopes[old.scope] || !before.scopes[old.scope]:
		case !there:
			lines[key] = key + " vanished"
		default:
			if text := changedFields(old.fields, now.fields); text != "" {
				lines[key] = key + " changed: " + text
			}
		}
	}
	for key, now := range after.records {
		if _, there := before.records[key]; !there && before.scopes[now.scope] {
			lines[key] = key + " appeared"
		}
	}
	return dropExplained(lines, before, after)
}

// dropExplained removes a change that another one causes, such as that of sysctls, which come and go with their link.
func dropExplained(lines map[string]string, before, after *Snapshot) []string {
	var out []string
	for _, key := range sortedKeys(lines) {
		r, ok := after.records[key]
		if !ok {
			r = before.records[key]
		}
		if r.owner != "" && explained(lines, r) {
			continue
		}
		out = append(out, lines[key])
	}
	return out
}

func explained(lines map[string]string, r record) bool {
	prefix := r.scope + ": " + r.owner
	if strings.HasSuffix(r.owner, " ") { // stands for all records with this prefix
		for key := range lines {
			if strings.HasPrefix(key, prefix) {
				return true
			}
		}
		return false
	}
	line := lines[prefix]
	return line != "" && !strings.HasPrefix(line, prefix+" changed")
}

func changedFields(old, now []field) string {
	was, is := asMap(old), asMap(now)
	var out []string
	for _, name := range sortedKeys(union(was, is)) {
		if was[name] != is[name] {
			out = append(out, fmt.Sprintf("%s %s -> %s", name, orNone(was[name]), orNone(is[name])))
		}
	}
	return strings.Join(out, ", ")
}

func asMap(fields []field) map[string]string {
	m := map[string]string{}
	for _, f := range fields {
		if m[f.name] != "" {
			m[f.name] += " "
		}
		m[f.name] += f.value
	}
	return m
}

func union(a, b map[string]string) map[string]string {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return all
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

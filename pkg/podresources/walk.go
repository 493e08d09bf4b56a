// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"bytes"
	"encoding/json"
	"strconv"
)

// walk returns the entries of a checkpoint whose UIDs are to be kept. isKnown is false for a file that is not, from its first byte to its last, as
// kubelets write it: then nothing is found, which says nothing.
func walk(data []byte, keep func(uid []byte) bool) (found []entry, isKnown bool) {
	w := walker{rest: data, ok: true}
	w.want(`{"Data":{"PodDeviceEntries":`)
	if !w.has("null") {
		w.want("[")
		w.listed("]", func() {
			at := w.rest
			if uid := w.entry(); !w.ok || !keep(uid) {
				return
			}
			var e entry
			w.ok = json.Unmarshal(at[:len(at)-len(w.rest)], &e) == nil
			found = append(found, e)
		})
	}
	w.want(`,"RegisteredDevices":`)
	w.lists()
	w.want(`},"Checksum":`)
	sum, isEnd := bytes.CutSuffix(w.rest, []byte("}"))
	n, err := strconv.ParseUint(string(sum), 10, 64)
	if !w.ok || !isEnd || err != nil || strconv.FormatUint(n, 10) != string(sum) {
		return nil, false
	}
	return found, true
}

// walker has what is left of a checkpoint, and whether it was as expected so far; if not, nothing else counts.
type walker struct {
	rest []byte
	ok   bool
}

// has skips a text if it comes next.
func (w *walker) has(text string) bool {
	if len(w.rest) < len(text) || string(w.rest[:len(text)]) != text {
		return false
	}
	w.rest = w.rest[len(text):]
	return true
}

// want skips a text that has to come next.
func (w *walker) want(text string) { w.ok = w.ok && w.has(text) }

// name skips a string of printable ASCII without escapes, and returns what is between its quotes.
func (w *walker) name() (name []byte) {
	w.want(`"`)
	for i, c := range w.rest {
		if c == '"' {
			name, w.rest = w.rest[:i], w.rest[i+1:]
			return name
		}
		if c < ' ' || c > '~' || c == '\\' {
			break
		}
	}
	w.ok = false
	return nil
}

// listed skips items with commas between them, and what ends them.
func (w *walker) listed(end string, item func()) {
	if w.has(end) {
		return
	}
	item()
	for w.ok && w.has(",") {
		item()
	}
	w.want(end)
}

// entry skips one, and returns its UID.
func (w *walker) entry() (uid []byte) {
	w.want(`{"PodUID":`)
	uid = w.name()
	w.want(`,"ContainerName":`)
	w.name()
	w.want(`,"ResourceName":`)
	w.name()
	w.want(`,"DeviceIDs":`)
	w.lists()
	w.want(`,"AllocResp":`)
	w.name()
	w.want("}")
	return uid
}

// lists skips an object whose values are lists of strings.
func (w *walker) lists() {
	w.want("{")
	w.listed("}", func() {
		w.name()
		w.want(":")
		if !w.has("null") {
			w.want("[")
			w.listed("]", func() { w.name() })
		}
	})
}

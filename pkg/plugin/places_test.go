// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestPlacesOfLargeText checks that the time of KeyPlaces is proportional to the size of the text. A text can be large: for example, the
// JSON of all pods of a cluster.
func TestPlacesOfLargeText(t *testing.T) {
	const keys, patience = 30_000, 10 * time.Second
	var text strings.Builder
	text.WriteString("{\n\"first\": \"é\", ")
	for i := range keys {
		fmt.Fprintf(&text, `"k%06d": 0, `, i)
	}
	text.WriteString("\n \"last\": 0}")
	began := time.Now()
	places := KeyPlaces([]byte(text.String()))
	if took := time.Since(began); took > patience {
		t.Errorf("%d bytes took %s", text.Len(), took)
	}
	for key, want := range map[string]Place{"first": {2, 1}, "k000000": {2, 15}, "k000001": {2, 29}, "last": {3, 2}} {
		if places[key] != want {
			t.Errorf("%s: %v, want %v", key, places[key], want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"reflect"
	"testing"
)

// Once calls the function once for each result type, and copies of the request share the results. For a request that Run did not create, it
// stores none and calls the function each time.
func TestOnce(t *testing.T) {
	calls := 0
	count := func() int { calls++; return calls }
	r := &Request{once: map[reflect.Type]any{}}
	copied := *r
	if a, b, c := Once(r, count), Once(&copied, count), Once(r, func() string { return "other" }); a != 1 || b != 1 || c != "other" {
		t.Errorf("%d %d %s", a, b, c)
	}
	if a := Once(&Request{}, count); a != 2 {
		t.Errorf("%d without a request of Main", a)
	}
}

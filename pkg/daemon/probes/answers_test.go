// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestLimitAnswers: an answer, or an event of a watch, may have maxAnswer bytes and not twice that. A watch may have any number of events.
// The lines of an answer count together.
func TestLimitAnswers(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		size := map[string]int{"/fits": maxAnswer, "/lines": maxAnswer, "/larger": 2 * maxAnswer}[r.URL.Path]
		for range 3 {
			if _, err := io.WriteString(w, strings.Repeat("x", size-1)+"\n"); err != nil || r.URL.Path != "/lines" && !r.URL.Query().Has("watch") {
				break
			}
		}
	}))
	defer server.Close()
	client := http.Client{Transport: LimitAnswers(http.DefaultTransport)}
	for path, ok := range map[string]bool{"/fits": true, "/larger": false, "/lines": false, "/fits?watch=true": true,
		"/larger?watch=true": false} {
		answer, err := client.Get(server.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, answer.Body); (err == nil) != ok {
			t.Errorf("%s: %v", path, err)
		}
		answer.Body.Close()
	}
}

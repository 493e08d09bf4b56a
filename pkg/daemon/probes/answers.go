// SPDX-License-Identifier: Apache-2.0

package probes

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
)

// maxAnswer is the maximum size in bytes of an answer of the API server, and of an event in a watch. client-go has the same limit for
// events in protobuf, and none for the rest.
const maxAnswer = 16 << 20

// LimitAnswers is a wrapper for rest.Config. An answer that does not end would take all memory.
func LimitAnswers(next http.RoundTripper) http.RoundTripper { return limitedAnswers{next} }

type limitedAnswers struct{ http.RoundTripper }

// WrappedRoundTripper lets client-go close idle connections.
func (l limitedAnswers) WrappedRoundTripper() http.RoundTripper { return l.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (l limitedAnswers) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := l.RoundTripper.RoundTrip(r)
	if err == nil {
		answer.Body = &limitedBody{ReadCloser: answer.Body, watch: r.URL.Query().Has("watch")}
	}
	return answer, err
}

// limitedBody is the body of an answer, or of a watch, whose events in JSON end with a newline.
type limitedBody struct {
	io.ReadCloser
	watch bool
	size  int
}

func (b *limitedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.size += n
	if end := bytes.LastIndexByte(p[:n], '\n'); b.watch && end >= 0 {
		b.size = n - end - 1
	}
	if b.size > maxAnswer {
		return 0, fmt.Errorf("the answer of the API server is larger than %d bytes", maxAnswer)
	}
	return n, err
}

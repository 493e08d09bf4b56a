// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"testing"

	"github.com/podlace/podlace/pkg/sandbox"
)

func BenchmarkTake(b *testing.B) {
	for b.Loop() {
		if _, err := sandbox.Take(sandbox.Options{}); err != nil {
			b.Fatal(err)
		}
	}
}

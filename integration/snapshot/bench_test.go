// SPDX-License-Identifier: Apache-2.0

package snapshot_test

import (
	"testing"

	"github.com/podlace/podlace/integration/snapshot"
)

func BenchmarkTake(b *testing.B) {
	for b.Loop() {
		if _, err := snapshot.Take(snapshot.Options{}); err != nil {
			b.Fatal(err)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	kwatch "k8s.io/apimachinery/pkg/watch"
	clienttesting "k8s.io/client-go/testing"
)

// TestStreamAfterList: after a failed streaming list, client-go sends an ordinary list request for the slices. After the next streaming
// list succeeds, client-go does not repeat the ordinary list. Therefore, after a successful streaming list, the publisher must consider an
// earlier failure of an ordinary list as resolved.
func TestStreamAfterList(t *testing.T) {
	l := newDRALab(t)
	client := l.client
	client.PrependReactor("list", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("connection reset by peer")
	})
	client.PrependWatchReactor("resourceslices", func(clienttesting.Action) (bool, kwatch.Interface, error) {
		return true, kwatch.NewFake(), nil
	})
	l.slices.setRunning(true)
	slices := l.slices.client().ResourceV1().ResourceSlices()
	if _, err := slices.List(t.Context(), metav1.ListOptions{}); err == nil || l.slices.upMetric() != 0 {
		t.Fatalf("%v, up %d", err, l.slices.upMetric())
	}
	_, err := slices.Watch(t.Context(), metav1.ListOptions{SendInitialEvents: new(true)})
	if err != nil || l.slices.upMetric() != 1 {
		t.Errorf("%v, up %d: %v", err, l.slices.upMetric(), l.slices.problems)
	}
}

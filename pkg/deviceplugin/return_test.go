// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
)

// TestReturnsVFs (V-22): VFs that pods left are brought back from the start on, and when that cannot be it is told once.
func TestReturnsVFs(t *testing.T) {
	l := prepareLab(t, twoPFs(t), `{"resourceList": [{"resourceName": "all"}]}`)
	var calls atomic.Int32
	again := make(chan struct{}, 9)
	l.Return = func() error {
		calls.Add(1)
		again <- struct{}{}
		return errors.New("operation not permitted")
	}
	l.kubelet.start()
	stop := l.start()
	for range 3 {
		<-again
	}
	stop()
	if got := strings.Count(l.log.String(), "cannot be brought back here"); got != 1 ||
		!strings.Contains(l.log.String(), "operation not permitted") {
		t.Errorf("told %d times in %d calls:\n%s", got, calls.Load(), l.log.String())
	}
}

// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
)

// TestReturnsVFs checks that the daemon restores orphaned VFs right after its start. A failure to restore a VF is logged only once.
func TestReturnsVFs(t *testing.T) {
	l := prepareLab(t, twoPFs(t), `{"resourceList": [{"resourceName": "all"}]}`)
	var calls atomic.Int32
	again := make(chan struct{}, 9)
	l.RestoreVFs = func() error {
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
	if got := strings.Count(l.log.String(), "could not restore orphaned VFs"); got != 1 ||
		!strings.Contains(l.log.String(), "operation not permitted") {
		t.Errorf("logged %d times in %d calls:\n%s", got, calls.Load(), l.log.String())
	}
}

// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"strings"
	"testing"
)

// TestFailureKubeletRoot configures a wrong root folder of the kubelet. Only pods in a namespace with a prepared claim may fail to
// start, and claims with a record keep their devices.
func TestFailureKubeletRoot(t *testing.T) {
	folder, _ := newNode(t, stateText(stateEntry("c-1", "shared", ours, "first")), newRecord("c-1", "shop", "shared", "a"))
	other := t.TempDir()
	_, err := NewCache(folder, other).Find(Pod{"shop", "web-0", "first"})
	if err == nil || !strings.Contains(err.Error(), "the pod may have claim shop/shared") {
		t.Errorf("got %v", err)
	}
	if devices, err := NewCache(folder, other).Find(Pod{"bank", "web-0", "second"}); err != nil || len(devices) > 0 {
		t.Errorf("%v, %v", devices, err)
	}
	if list, err := NewCache(folder, other).List(); err != nil || len(list) != 1 || !list[0].Has("0000:3b:10.0") {
		t.Errorf("%+v, %v", list, err)
	}
}

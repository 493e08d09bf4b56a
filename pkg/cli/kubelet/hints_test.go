// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kubeletnode"
	"github.com/podlace/podlace/pkg/cli/kubelet"
)

func TestHints(t *testing.T) {
	for _, c := range []struct {
		name, devices string
		machine       kubelet.Mask
		n             int
		reusable      []int
		want          string // "don't care" for nil
	}{
		{"both nodes", "0 0 1 1", 3, 2, nil, "{0}* {1}* {0,1}"},
		{"more than a node has", "0 0 1 1", 3, 3, nil, "{0,1}*"},
		{"more than are free near one", "0 0x 1 1x", 3, 2, nil, "{0,1}"},
		{"the ill ones count for what is preferred", "0 0! 1 1!", 3, 2, nil, "{0,1}"},
		{"too few", "0 0x 1x 1x", 3, 2, nil, ""},
		{"no node known", "- - -", 3, 1, nil, "don't care"},
		{"unknown ones are not counted", "0 - 1", 3, 2, nil, "{0,1}*"},
		{"only unknown ones are left", "0x - 1x", 3, 1, nil, ""},
		{"nodes without devices are left out", "0 0 2 2", 7, 2, nil, "{0}* {2}* {0,2}"},
		{"near several", "01 01 1", 3, 2, nil, "{0}* {1}* {0,1}"},
		{"a node that the machine does not have", "0 5", 3, 1, nil, "{0}*"},
		{"only such", "5 5", 3, 1, nil, ""},
		{"reusable ones must be near", "0x 0 1 1", 3, 2, []int{0}, "{0}* {0,1}"},
		{"reusable ones make up for what is missing", "0x 0x 1x", 3, 2, []int{0, 1}, "{0}* {0,1}"},
		{"reusable ones near no node", "-x 0 1", 3, 1, []int{0}, "{0}* {1}* {0,1}"},
		{"sets by size", "0 2 3 4", 0b11101, 1, nil,
			"{0}* {2}* {3}* {4}* {0,2} {0,3} {0,4} {2,3} {2,4} {3,4} {0,2,3} {0,2,4} {0,3,4} {2,3,4} {0,2,3,4}"},
	} {
		t.Run(c.name, func(t *testing.T) {
			hints := kubeletnode.ParseDevices(c.machine, c.devices).Hints(c.n, c.reusable)
			got := strings.Trim(fmt.Sprint(hints), "[]")
			if hints == nil {
				got = "don't care"
			}
			if got != c.want {
				t.Errorf("%d of %s: %q, want %q", c.n, c.devices, got, c.want)
			}
		})
	}
}

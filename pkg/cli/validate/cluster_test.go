// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"os"
	"strings"
	"testing"
)

// TestClusterConflist: the conflist in the manifest of a cluster, with plugins under their installed names, has no findings.
func TestClusterConflist(t *testing.T) {
	data, err := os.ReadFile("../../../conf/cluster/base/10-podlace.conflist")
	if err != nil {
		t.Fatal(err)
	}
	if keys, all := text(string(data), Node{}); len(keys) > 0 {
		t.Error(all)
	}
	for right, wrong := range map[string]string{`"isGateway"`: `"isGatway"`, `"backend"`: `"backnd"`,
		`"nonMasqueradeCIDRs"`: `"nonMasqueradeCIDR"`} {
		broken := strings.Replace(string(data), right, wrong, 1)
		if keys, _ := text(broken, Node{}); len(keys) == 0 || broken == string(data) {
			t.Errorf("%s in place of %s is not noticed", wrong, right)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package reconcile

import "testing"

// TestMultusNetwork: Podlace's prefix means something in plugin types, not in names of networks.
func TestMultusNetwork(t *testing.T) {
	for config, want := range map[string][2]bool{
		`{"type": "multus-shim"}`: {true, true},
		`{"type": "multus", "clusterNetwork": "/host/etc/cni/net.d/10-podlace.conflist"}`:        {true, true},
		`{"type": "multus", "clusterNetwork": "10-podlace"}`:                                     {true, true},
		`{"type": "multus", "clusterNetwork": "pods"}`:                                           {true, true},
		`{"type": "multus", "clusterNetwork": "podlace-old"}`:                                    {true, false},
		`{"plugins": [{"type": "multus", "clusterNetwork": "cilium"}]}`:                          {true, false},
		`{"type": "multus", "delegates": [{"name": "pods", "type": "bridge"}]}`:                  {true, true},
		`{"type": "multus", "delegates": [{"name": "a", "plugins": [{"type": "podlace-pod"}]}]}`: {true, true},
		`{"type": "multus", "delegates": [{"name": "podlace-a", "type": "flannel"}]}`:            {true, false},
		`{"type": "bridge", "name": "pods"}`:                                                     {false, true},
		`[]`:                                                                                     {false, false},
	} {
		isMultus, isOurs := MultusNetwork([]byte(config), "pods", "10-podlace.conflist")
		if isMultus != want[0] || want[0] && isOurs != want[1] {
			t.Errorf("%s: %t, %t", config, isMultus, isOurs)
		}
	}
}

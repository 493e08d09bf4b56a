// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"strings"
	"testing"
)

// TestTakeOverWarnsOfLeases: before the agent takes over a network whose leases its own conflist does not read, it says where they are.
func TestTakeOverWarnsOfLeases(t *testing.T) {
	const kindnet = `{"cniVersion": "0.3.1", "name": "kindnet", "plugins": [
		{"type": "ptp", "ipam": {"type": "host-local", "dataDir": "/run/cni-ipam-state", "ranges": [[{"subnet": "10.2.0.0/24"}]]}}]}`
	l := newLab(t, `"takeOver": true`)
	l.put("config/"+conflistName, strings.Replace(testConflist, `"type"`, `"ipam": {"type": "host-local"}, "type"`, 1))
	l.put("net.d/05-kindnet.conflist", kindnet)
	l.put("net.d/06-other.conflist", otherConflist)
	l.put("net.d/07-same.conflist", `{"name": "podlace", "plugins": [{"type": "bridge", "ipam": {"type": "host-local"}}]}`)
	l.put("net.d/08-flannel.conflist", `{"name": "cbr0", "plugins": [{"type": "flannel"}]}`)
	l.ready()
	log := l.log.String()
	for file, leases := range map[string]string{"05-kindnet": "/run/cni-ipam-state/kindnet", "06-other": "unknown",
		"08-flannel": "/var/lib/cni/networks/cbr0"} {
		if !strings.Contains(log, "file="+l.dir+"/net.d/"+file+".conflist theirLeases="+leases+" ourLeases=/var/lib/cni/networks/podlace\n") {
			t.Errorf("%s: %s", file, log)
		}
	}
	if strings.Contains(log, "07-same.conflist their") {
		t.Error(log)
	}
}

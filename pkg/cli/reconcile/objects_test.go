// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/attachment"
)

// TestObjects also covers the iptables backend and VFs.
func TestObjects(t *testing.T) {
	for _, c := range []struct {
		name, plugin, state string
		want                []string
	}{
		{"bridge with iptables", "bridge", `{"bridge": "cni0", "masquerade": "iptables", "addresses": ["10.58.0.3/16"]}`, []string{
			"link veth241c6061bca, port of bridge cni0; peer eth0 in the pod", "address 10.58.0.3/16 of eth0",
			"iptables tables nat and mangle: chain CNI-c97b5d9d77370aab342f113c"}},
		{"portmap with iptables", "portmap", `{"backend": "iptables", "ports": [{"protocol": "udp", "port": 53, "to": "10.58.0.3:53"}]}`, []string{
			"iptables table nat: chain CNI-DN-c97b5d9d77370aab342f1",
			"nft table podlace_hostport: reservation of hostPort udp 53 to 10.58.0.3:53"}},
		{"portmap after DEL", "portmap", `{"ended": true, "ports": [{"protocol": "udp", "port": 53, "to": "10.58.0.3:53"}]}`, nil},
		{"egress limit", "bandwidth", `{"link": "veth1", "ifb": "bwp1", "egress": {"rate": 1000000, "burst": 5000}}`, []string{
			"filter of veth1: redirect of ingress to ifb link bwp1", "qdisc tbf of bwp1: egress limit of 1000000 bit/s, burst 5000 bytes"}},
		{"VFs", "sriov", `{"vfs": [{"address": "0000:11:02.0", "name": "net1", "mac": "02:00:00:00:00:01", "addresses": ["10.9.0.2/24"]},
			{"address": "0000:11:02.1", "userspace": "vfio-pci"}]}`, []string{
			"VF 0000:11:02.0 as net1 in the pod, MAC 02:00:00:00:00:01, address 10.9.0.2/24", "VF 0000:11:02.1 with driver vfio-pci"}},
		{"another plugin", "tuning", `{}`, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			rec := attachment.Record{Key: attachment.Key{Network: "n", ContainerID: "c", IfName: "eth0"}, Plugin: c.plugin,
				State: json.RawMessage(c.state)}
			got, err := Objects(rec)
			if diff := cmp.Diff(c.want, got); diff != "" || err != nil {
				t.Errorf("%v\n%s", err, diff)
			}
		})
	}
}

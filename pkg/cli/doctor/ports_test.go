// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/hostlocal"
)

// TestPorts: each detached host side is reported, or only the bridge if that is missing or down.
func TestPorts(t *testing.T) {
	l := newLab(t)
	l.t.Cleanup(func() { l.command("sh", "-c", "ip link del cnidoc 2>/dev/null; ip link del other0 2>/dev/null; true") })
	for _, id := range []string{"first", "second"} {
		pod := kerneltest.Lab{T: t, Plugin: bridge.Plugin(hostlocal.Plugin()).Run, Pod: kerneltest.NewPod(t), Conf: kerneltest.Object{
			"cniVersion": "1.1.0", "name": "pods", "type": "bridge", "bridge": "cnidoc", "isGateway": true,
			"ipam": kerneltest.Object{"type": "host-local", "subnet": "10.91.0.0/29"}}}
		pod.OK(pod.Call("ADD", id))
		t.Cleanup(func() { pod.OK(pod.Call("DEL", id)) })
	}
	veth := attachment.Key{Network: "pods", ContainerID: "second", IfName: "eth0"}.HostVeth()
	for _, c := range []struct{ spoil, want string }{
		{"true", ""},
		{"ip link set " + veth + " nomaster", "error " + veth + ", the host side of container second, is not a port of cnidoc | the record of the pod " +
			"names cnidoc; " + veth + " has no bridge | podlace reload"},
		{"ip link add other0 type bridge; ip link set " + veth + " master other0", "warning " + veth +
			", the host side of container second, is not a port of cnidoc | the record of the pod names cnidoc; " + veth + " is a port of other0 | ip link set " + veth + " master cnidoc"},
		{"ip link set " + veth + " master cnidoc; mv /run/podlace/pods /run/podlace/.moved", "warning pods without a record: 2 | no record in /run/podlace has " +
			"the interface veth"},
		{"mv /run/podlace/.moved /run/podlace/pods", ""},
		{"ip link set cnidoc down", "error the bridge cnidoc is down | the record of container second names it | podlace reload"},
		{"ip link set cnidoc up", ""},
		{"ip link del cnidoc", "error the bridge cnidoc is missing | the record of container "},
	} {
		l.command("sh", "-c", c.spoil)
		found := l.problems("ports")
		if c.want == "" && len(found) > 0 || c.want != "" && (len(found) != 1 || !strings.HasPrefix(found[0], c.want)) {
			t.Errorf("%s: found %q, want %q", c.spoil, found, c.want)
		}
	}
}

// TestLostLease: a live pod whose lease was deleted is named until it is restored.
func TestLostLease(t *testing.T) {
	l := newLab(t)
	pod := kerneltest.Lab{T: t, Plugin: bridge.Plugin(hostlocal.Plugin()).Run, Pod: kerneltest.NewPod(t), Conf: kerneltest.Object{
		"cniVersion": "1.1.0", "name": "unleased", "type": "bridge", "bridge": "cnilease",
		"ipam": kerneltest.Object{"type": "host-local", "subnet": "10.92.0.0/29"}}}
	l.t.Cleanup(func() { l.command("sh", "-c", "ip link del cnilease 2>/dev/null; true") })
	pod.OK(pod.Call("ADD", "victim"))
	t.Cleanup(func() { pod.OK(pod.Call("DEL", "victim")) })
	const lease = hostlocal.DefaultDir + "/unleased/10.92.0.2"
	kerneltest.Must(t, os.Remove(lease))
	found := l.problems("records")
	const want = `error pods without a lease of their address: 1 | for example container victim of network "unleased" | podlace reload`
	if len(found) != 1 || !strings.HasPrefix(found[0], want) {
		t.Errorf("%q", found)
	}
	kerneltest.Must(t, hostlocal.Restore(slog.New(slog.DiscardHandler)))
	if _, err := os.Lstat(lease); err != nil || len(l.problems("records")) > 0 {
		t.Errorf("%v, %q", err, l.problems("records"))
	}
}

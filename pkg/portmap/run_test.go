// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/store"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

type (
	object  = kerneltest.Object
	outcome = kerneltest.Outcome
)

// testLab is a node with a pod, whose addresses it reaches through the interface pt0.
type testLab struct {
	kerneltest.Lab
}

func newLab(t *testing.T) testLab {
	t.Helper()
	l := testLab{kerneltest.Lab{T: t, Plugin: Plugin().Run, Pod: kerneltest.NewPod(t), Env: map[string]string{"PODLACE_LOG": "debug"},
		Conf: object{"cniVersion": "1.1.0", "name": "net", "type": "portmap", "prevResult": prevResult("10.71.0.5/24", "fd00:71::5/64"),
			"runtimeConfig": object{"portMappings": []any{port(8080, 80, "tcp"), port(5353, 53, "udp")}}}}}
	t.Cleanup(func() {
		if err := errors.Join(kerneltest.FlushNFT(), delLink("pt0")); err != nil {
			t.Error(err)
		}
	})
	if err := errors.Join(kerneltest.FlushNFT(), addLink("pt0", "10.71.0.1/24", "fd00:71::1/64")); err != nil {
		t.Fatal(err)
	}
	return l
}

func port(host, container int, protocol string) object {
	return object{"hostPort": host, "containerPort": container, "protocol": protocol}
}

func prevResult(addresses ...string) object {
	var ips []any
	for _, a := range addresses {
		ips = append(ips, object{"address": a, "interface": 0})
	}
	return object{"cniVersion": "1.1.0", "interfaces": []any{object{"name": "eth0", "sandbox": "/x"}}, "ips": ips}
}

func addLink(name string, addresses ...string) error {
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}
	errs := []error{netlink.LinkAdd(bridge)}
	for _, a := range addresses {
		errs = append(errs, netlink.AddrAdd(bridge, &netlink.Addr{IPNet: kernel.IPNet(netip.MustParsePrefix(a)), Flags: 2})) // IFA_F_NODAD
	}
	return errors.Join(append(errs, netlink.LinkSetUp(bridge))...)
}

func delLink(name string) error {
	return netlink.LinkDel(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}})
}

func openHost(t testing.TB) *kernel.Node {
	t.Helper()
	h, err := kernel.Host()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return h
}

func (l testLab) chain(id string) string {
	return podChain(attachment.Key{Network: "net", ContainerID: id, IfName: "eth0"})
}

// recordFile returns the path of a container's record.
func (l testLab) recordFile(id string) string {
	return filepath.Join(store.Root, "net", "portmap-"+attachment.Key{Network: "net", ContainerID: id, IfName: "eth0"}.Hash())
}

// Call calls kerneltest.Lab.Call for a container of the pod shop/<id>.
func (l testLab) Call(verb, id string, keys ...any) outcome {
	l.Helper()
	return l.Lab.Call(verb, id, append([]any{"CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=" + id}, keys...)...)
}

// podElements returns the nftables elements of all pods.
func podElements(t testing.TB) (lines []string) {
	t.Helper()
	s, err := snapshot.Take(snapshot.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(s.String()) {
		if strings.Contains(line, "nft element inet podlace_hostport") && !strings.Contains(line, " hairpin ") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

func resultOf(t testing.TB, prev object) *types100.Result {
	t.Helper()
	data, err := json.Marshal(prev)
	if err != nil {
		t.Fatal(err)
	}
	var r types100.Result
	if err := json.Unmarshal(data, &r); err != nil {
		t.Fatal(err)
	}
	return &r
}

func ip(s string) net.IP { return netip.MustParseAddr(s).AsSlice() }

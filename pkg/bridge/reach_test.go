// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/pkg/kernel/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
)

// TestNeighboursReachAtOnce: the first IPv6 packets between a new pod and its neighbours pass, however late the kernel does what the request to
// add an address leaves to its work queue. A lost neighbour solicitation costs a second.
func TestNeighboursReachAtOnce(t *testing.T) {
	l := newLab(t)
	other := l.other()
	stays := other.add("stays")
	fill := kerneltest.DelayAddresses(t)
	for i := range 5 {
		l := l.other()
		fill()
		a := l.add(fmt.Sprint("in", i))
		l.answers(other.pod, a.result.IPs[1].Address.IP.String())
		l = l.other()
		fill()
		l.add(fmt.Sprint("out", i))
		l.answers(l.pod, stays.result.IPs[1].Address.IP.String())
	}
}

// TestGatewayAnswersAtOnce: so do those between the first pod of a network and its gateway.
func TestGatewayAnswersAtOnce(t *testing.T) {
	l := bareLab(t, "bridge", "btgw")
	t.Cleanup(func() { _ = onHost("btgw", netlink.LinkDel) })
	fill := kerneltest.DelayAddresses(t)
	l.plugin.Add = func(r *plugin.Request) (*types100.Result, error) {
		j, err := bridge{}.open(r)
		if err != nil {
			return nil, err
		}
		defer j.close()
		w, err := j.wire()
		if err != nil {
			return nil, err
		}
		for i := range 5 {
			fill()
			gateway := netip.MustParsePrefix(fmt.Sprintf("fd00:70:%d::5:%d/64", i, 10+i))
			err = errors.Join(err, j.gateway(w, layer3{gateways: []netip.Prefix{gateway}}))
			groups, readErr := os.ReadFile("/proc/thread-self/net/igmp6")
			if err = errors.Join(err, readErr); !strings.Contains(string(groups), fmt.Sprintf("ff0200000000000000000001ff0500%d", 10+i)) {
				t.Errorf("the node is not in the solicited-node group of %s", gateway)
			}
		}
		return &types100.Result{CNIVersion: "1.1.0"}, err
	}
	l.ok(l.call("ADD", "first"))
	l.ok(l.call("DEL", "first"))
}

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

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/plugin"
)

// TestNeighboursReachAtOnce: a new pod receives neighbour solicitations as soon as it has its addresses. The kernel joins the multicast
// group of a new IPv6 address later, in a work queue, and a neighbour repeats a lost solicitation only after a second.
func TestNeighboursReachAtOnce(t *testing.T) {
	l := newLab(t)
	fill := kerneltest.DelayAddresses(t)
	for i := range 10 {
		address := netip.MustParsePrefix(fmt.Sprintf("fd00:70::5:%d/64", 10+i))
		l := l.other()
		l.runPart("pod", func(j *job, w wiring) error {
			fill()
			err := j.configure(w, layer3{Plan: ipam.Plan{Addresses: []netip.Prefix{address}}})
			l.mustJoinGroup(l.Pod.Do, address)
			return err
		})
	}
}

// TestGatewayAnswersAtOnce: the node answers neighbour solicitations for a new gateway address at once.
func TestGatewayAnswersAtOnce(t *testing.T) {
	l := bareLab(t, "bridge", "btgw")
	t.Cleanup(func() { _ = onHost("btgw", netlink.LinkDel) })
	fill := kerneltest.DelayAddresses(t)
	here := func(f func() error) error { return f() }
	l.runPart("first", func(j *job, w wiring) (err error) {
		for i := range 10 {
			gateway := netip.MustParsePrefix(fmt.Sprintf("fd00:70:%d::5:%d/64", i, 10+i))
			fill()
			err = errors.Join(err, j.setUpGateway(w, layer3{gateways: []netip.Prefix{gateway}}))
			l.mustJoinGroup(here, gateway)
		}
		return err
	})
}

// runPart creates a pod's links, runs one part of ADD, and deletes the pod.
func (l lab) runPart(id string, part func(*job, wiring) error) {
	l.Helper()
	p := Plugin(hostlocal.Plugin())
	p.Add = func(r *plugin.Request) (*types100.Result, error) {
		j, err := bridge{}.open(r)
		if err != nil {
			return nil, err
		}
		defer j.close()
		w, err := j.createLinks()
		if err != nil {
			return nil, err
		}
		return &types100.Result{CNIVersion: "1.1.0"}, part(j, w)
	}
	l.Plugin = p.Run
	o := l.Call("ADD", id)
	l.OK(l.Call("DEL", id))
	l.OK(o)
}

// mustJoinGroup expects a namespace to have joined the solicited-node multicast group of an address (RFC 4291 section 2.7.1).
func (l lab) mustJoinGroup(within func(func() error) error, address netip.Prefix) {
	l.Helper()
	group := "ff0200000000000000000001ff" + strings.ReplaceAll(address.Addr().StringExpanded()[32:], ":", "")
	if err := within(func() error {
		groups, err := os.ReadFile("/proc/thread-self/net/igmp6")
		if !strings.Contains(string(groups), group) {
			l.Errorf("%s: not in its solicited-node group", address)
		}
		return err
	}); err != nil {
		l.Error(err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/podlace/podlace/integration/meter"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

const (
	sideBare = "bare veth"

	pathPod  = "pod to pod"
	pathHost = "pod to host"

	datapathRepeats = 12 // many short repeats, because load and the placement on processors change from second to second
	firstRepeats    = 3
)

// flowThroughput is the throughput of a flow and its processor time per gigabit.
type flowThroughput struct {
	gigabits   float64 // per second
	cpuPerGbit float64 // seconds
}

type flowTrack struct {
	side, path string
	flow       meter.Flow
	attached   *chain // a pod that is detached after the measurements
	measured   []flowThroughput
	err        error
}

// measurePaths measures unlimited flows from pod to pod and from pod to host, for both plugin sets and, for comparison, through veth pairs
// that no plugin created.
func measurePaths(sides []pluginSet, n nodes, each time.Duration) ([]*flowTrack, error) {
	var tracks []*flowTrack
	for _, side := range sides {
		t, err := n.pluginTracks(side)
		if err != nil {
			t = failedTracks(side.name, err)
		}
		tracks = append(tracks, t...)
	}
	bare, err := n.bareTracks()
	if err != nil {
		return nil, err
	}
	tracks = append(tracks, bare...)
	// Flows of one path run directly one after the other, so that changes of the machine's load affect them equally.
	slices.SortStableFunc(tracks, func(a, b *flowTrack) int { return strings.Compare(b.path, a.path) })
	for range datapathRepeats {
		for _, t := range tracks {
			t.measureOnce(each)
		}
		slices.Reverse(tracks)
	}
	for _, t := range tracks {
		if t.attached != nil {
			t.err = errors.Join(t.err, t.attached.run(verbDel, executeProcess))
		}
	}
	return tracks, nil
}

func failedTracks(side string, err error) []*flowTrack {
	return []*flowTrack{{side: side, path: pathPod, err: err}, {side: side, path: pathHost, err: err}}
}

// pluginTracks attaches two pods, one with a hostPort, and returns the flows between them and to the node.
func (n nodes) pluginTracks(side pluginSet) ([]*flowTrack, error) {
	var addresses []netip.Addr
	var gateway netip.Addr
	var chains []*chain
	nodeName := "datapath-" + side.name
	for i := range 2 {
		c, err := n.pluginChain(side, nodeName, nftables(), false)
		if err != nil {
			return nil, err
		}
		if c.pod, err = n.open(fmt.Sprintf("%s-%d", nodeName, i)); err != nil {
			return nil, err
		}
		c.id = c.pod.Name
		if i > 0 {
			c.args = nil // the first pod has the port
		}
		if err := c.run(verbAdd, executeProcess); err != nil {
			return nil, err
		}
		address, gw, err := c.podAddress()
		if err != nil {
			return nil, err
		}
		gateway, addresses, chains = gw, append(addresses, address), append(chains, c)
	}
	tracks := []*flowTrack{
		newTrack(side.name, pathPod, chains[0].pod, chains[1].pod, addresses[1]),
		newTrack(side.name, pathHost, chains[0].pod, n[nodeName], gateway),
	}
	for i, t := range tracks {
		t.attached = chains[i]
	}
	return tracks, nil
}

func newTrack(side, path string, from, to *sandbox.Pod, address netip.Addr) *flowTrack {
	return &flowTrack{side: side, path: path, flow: meter.Flow{
		Protocol: meter.TCP, From: from.Do, To: to.Do, Listen: netip.AddrPortFrom(address, 0),
	}}
}

// bareTracks returns flows through two veth pairs that no plugin created: from pod to pod, and from pod to host.
func (n nodes) bareTracks() ([]*flowTrack, error) {
	var tracks []*flowTrack
	for i, path := range []string{pathPod, pathHost} {
		receiver := netip.MustParsePrefix(fmt.Sprintf("10.91.%d.1/24", i))
		sender := netip.PrefixFrom(receiver.Addr().Next(), receiver.Bits())
		to, err := n.open(fmt.Sprintf("bare-receiver-%d", i))
		if err != nil {
			return nil, err
		}
		from, err := n.open(fmt.Sprintf("bare-sender-%d", i))
		if err != nil {
			return nil, err
		}
		if err := joinByVeth(to, "veth0", "", from, netip.Prefix{}, receiver, sender); err != nil {
			return nil, fmt.Errorf("bare veth: %w", err)
		}
		tracks = append(tracks, newTrack(sideBare, path, from, to, receiver.Addr()))
	}
	return tracks, nil
}

func (t *flowTrack) measureOnce(each time.Duration) {
	if t.err != nil {
		return
	}
	flow := t.flow
	flow.Duration = each
	spent := startSpending(0)
	result, err := meter.Run(context.Background(), flow)
	if err != nil {
		t.err = fmt.Errorf("%s, %s: %w", t.side, t.path, err)
		return
	}
	cost, err := spent()
	if err != nil {
		t.err = err
		return
	}
	gigabits := float64(result.Bytes) * 8 / 1e9
	t.measured = append(t.measured, flowThroughput{gigabits: result.Mean.Payload / 1e9, cpuPerGbit: cost.Seconds() / gigabits})
}

// medianThroughput returns the median throughput, and that of the known processor times.
func (t *flowTrack) medianThroughput() flowThroughput {
	var rate, cost []float64
	for _, m := range t.measured {
		rate = append(rate, m.gigabits)
		if m.cpuPerGbit > 0 {
			cost = append(cost, m.cpuPerGbit)
		}
	}
	return flowThroughput{median(rate), median(cost)}
}

// ratioOver returns the median ratio of this flow's throughput to that of base. Each ratio compares measurements of the same repetition.
func (t *flowTrack) ratioOver(base *flowTrack) float64 {
	var ratios []float64
	for i := range min(len(t.measured), len(base.measured)) {
		ratios = append(ratios, t.measured[i].gigabits/base.measured[i].gigabits)
	}
	return median(ratios)
}

func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	mid := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[mid]
	}
	return (sorted[mid-1] + sorted[mid]) / 2
}

// firstBurst is what limited pods of one plugin set transferred in their first second, in Mbit.
type firstBurst struct {
	side, direction string
	megabits        []float64
	err             error
}

const (
	intoPod  = "into the pod"
	outOfPod = "out of the pod"
)

// measureFirstSecond measures what a limited pod transfers in its first second. Each repetition needs a new pod with a full token bucket.
func measureFirstSecond(sides []pluginSet, n nodes) []*firstBurst {
	var bursts []*firstBurst
	for _, side := range sides {
		bursts = append(bursts, &firstBurst{side: side.name, direction: intoPod}, &firstBurst{side: side.name, direction: outOfPod})
	}
	for range firstRepeats {
		for i, side := range sides {
			in, out := bursts[2*i], bursts[2*i+1]
			if in.err != nil {
				continue
			}
			if err := n.burst(side, in, out); err != nil {
				in.err, out.err = err, err
			}
		}
	}
	return bursts
}

func (n nodes) burst(side pluginSet, in, out *firstBurst) error {
	c, err := n.pluginChain(side, "first-"+side.name, nftables(), true)
	if err != nil {
		return err
	}
	return c.whileAttached(func() error {
		for _, b := range []*firstBurst{in, out} {
			flow, err := c.flowOf(b.direction)
			if err != nil {
				return err
			}
			flow.Protocol, flow.Duration = meter.TCP, time.Second
			result, err := meter.Run(context.Background(), flow)
			if err != nil {
				return fmt.Errorf("%s, %s: %w", side.name, b.direction, err)
			}
			b.megabits = append(b.megabits, float64(result.Bytes)*8/1e6)
		}
		return nil
	})
}

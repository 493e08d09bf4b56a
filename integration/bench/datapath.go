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

	"github.com/podlace/podlace/pkg/meter"
	"github.com/podlace/podlace/pkg/sandbox"
)

const (
	sideBare = "bare veth"

	pathPod  = "pod to pod"
	pathHost = "pod to host"

	datapathRepeats = 12 // many short repeats, because load and the placement on processors change from second to second
	firstRepeats    = 3
)

// throughput is the amount that one flow moved, and its cost.
type throughput struct {
	gigabits   float64 // per second
	cpuPerGbit float64 // seconds
}

// track is one side's flow along one path, with its measurements.
type track struct {
	side, path string
	flow       meter.Flow
	attached   *chain // a pod that is detached after the measurements
	measured   []throughput
	err        error
}

// datapath measures pod to pod and pod to host for both plugin folders, without limits, and for a bare veth pair.
func datapath(sides []side, n nodes, each time.Duration) ([]*track, error) {
	var tracks []*track
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
	// Flows that are compared run one after the other.
	slices.SortStableFunc(tracks, func(a, b *track) int { return strings.Compare(b.path, a.path) })
	for range datapathRepeats {
		for _, t := range tracks {
			t.measure(each)
		}
		slices.Reverse(tracks)
	}
	for _, t := range tracks {
		if t.attached != nil {
			t.err = errors.Join(t.err, t.attached.run(verbDel, execute))
		}
	}
	return tracks, nil
}

func failedTracks(side string, err error) []*track {
	return []*track{{side: side, path: pathPod, err: err}, {side: side, path: pathHost, err: err}}
}

// pluginTracks attaches two pods, one with a port.
func (n nodes) pluginTracks(side side) ([]*track, error) {
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
		if err := c.run(verbAdd, execute); err != nil {
			return nil, err
		}
		address, gw, err := c.address()
		if err != nil {
			return nil, err
		}
		gateway, addresses, chains = gw, append(addresses, address), append(chains, c)
	}
	tracks := []*track{
		newTrack(side.name, pathPod, chains[0].pod, chains[1].pod, addresses[1]),
		newTrack(side.name, pathHost, chains[0].pod, n[nodeName], gateway),
	}
	for i, t := range tracks {
		t.attached = chains[i]
	}
	return tracks, nil
}

func newTrack(side, path string, from, to *sandbox.Pod, address netip.Addr) *track {
	return &track{side: side, path: path, flow: meter.Flow{
		Protocol: meter.TCP, From: from.Do, To: to.Do, Listen: netip.AddrPortFrom(address, 0),
	}}
}

// bareTracks creates one veth pair between two pods, and one between a pod and a host, without any plugin.
func (n nodes) bareTracks() ([]*track, error) {
	var tracks []*track
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
		if err := join(to, "veth0", "", from, netip.Prefix{}, receiver, sender); err != nil {
			return nil, fmt.Errorf("bare veth: %w", err)
		}
		tracks = append(tracks, newTrack(sideBare, path, from, to, receiver.Addr()))
	}
	return tracks, nil
}

// measure runs the flow once.
func (t *track) measure(each time.Duration) {
	if t.err != nil {
		return
	}
	flow := t.flow
	flow.Duration = each
	spent := spending(0)
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
	t.measured = append(t.measured, throughput{gigabits: result.Mean.Payload / 1e9, cpuPerGbit: cost.Seconds() / gigabits})
}

// medians returns the separate medians of throughput and cost, without unknown costs.
func (t *track) medians() throughput {
	var rate, cost []float64
	for _, m := range t.measured {
		rate = append(rate, m.gigabits)
		if m.cpuPerGbit > 0 {
			cost = append(cost, m.cpuPerGbit)
		}
	}
	return throughput{median(rate), median(cost)}
}

// ratioOver returns the median ratio of both tracks in the same repeat.
func (t *track) ratioOver(base *track) float64 {
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

// burst is the amount that limited pods of one side received in their first second, in Mbit.
type burst struct {
	side, direction string
	megabits        []float64
	err             error
}

const (
	intoPod  = "into the pod"
	outOfPod = "out of the pod"
)

// firstSecond attaches a new pod for each repeat, because a token bucket is full only once.
func firstSecond(sides []side, n nodes) []*burst {
	var bursts []*burst
	for _, side := range sides {
		bursts = append(bursts, &burst{side: side.name, direction: intoPod}, &burst{side: side.name, direction: outOfPod})
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

func (n nodes) burst(side side, in, out *burst) error {
	c, err := n.pluginChain(side, "first-"+side.name, nftables(), true)
	if err != nil {
		return err
	}
	return c.attached(func() error {
		for _, b := range []*burst{in, out} {
			flow, err := c.flow(b.direction)
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

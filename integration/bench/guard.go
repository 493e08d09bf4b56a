// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"time"

	"github.com/podlace/podlace/integration/meter"
)

const (
	guardDatagrams = 100_000 // the row shows the time of this many
	guardPayload   = 64
)

// measureGuard compares pods with and without antiSpoof: the time of verbs, and the traffic between two pods.
func (r *report) measureGuard(o options, n nodes) {
	var entries []*contenderEntry
	var streams, datagrams []*flowTrack
	for _, guarded := range []bool{false, true} {
		name := map[bool]string{false: "guard-off", true: "guard-on"}[guarded]
		bridge := masqueradedBridge("10.99.0.0/16", "fd00:99::/64").withKey("antiSpoof", guarded)
		c, err := n.chainOf(name, "node-"+name, pluginSet{sideOurs, o.plugins}, bridge)
		var pods []*chain
		if err == nil {
			pods, err = n.fillPods(c, 2, nil)
		}
		if err != nil {
			r.fail(name, err)
			return
		}
		entries = append(entries, newEntry(name, c))
		to, _, err := pods[1].podAddress()
		if err != nil {
			r.fail(name, err)
			return
		}
		stream, datagram := newTrack(name, pathPod, pods[0].pod, pods[1].pod, to), newTrack(name, pathPod, pods[0].pod, pods[1].pod, to)
		datagram.flow.Protocol, datagram.flow.Size = meter.UDP, guardPayload
		streams, datagrams = append(streams, stream), append(datagrams, datagram)
	}
	runRounds(entries, o.rounds)
	if err := errors.Join(entries[0].err, entries[1].err); err != nil {
		r.fail("antiSpoof", err)
		return
	}
	for _, verb := range []string{verbAdd, verbCheck, verbDel} {
		r.addGrowth("bridge "+verb+", with antiSpoof", 0, map[string]figure{
			sideOurs: {Base: p50(entries[0].samples[verb].chain), Value: p50(entries[1].samples[verb].chain)}})
	}
	each := time.Duration(o.seconds / datapathRepeats * float64(time.Second))
	r.addGuarded("a gigabit from pod to pod by TCP, with antiSpoof", streams, each, 1)
	r.addGuarded("100,000 datagrams of 64 bytes from pod to pod, with antiSpoof", datagrams, each, guardDatagrams*guardPayload*8/1e9)
}

// addGuarded adds rows with the time and the processor time of the same amount of traffic with and without antiSpoof.
func (r *report) addGuarded(what string, tracks []*flowTrack, each time.Duration, gigabits float64) {
	for range datapathRepeats {
		for _, t := range tracks {
			t.measureOnce(each)
		}
	}
	off, on := tracks[0].medianThroughput(), tracks[1].medianThroughput()
	if err := errors.Join(tracks[0].err, tracks[1].err); err != nil {
		r.fail("antiSpoof, traffic", err)
		return
	}
	r.addGrowth(what, 0, map[string]figure{sideOurs: {Base: 1000 * gigabits / off.gigabits, Value: 1000 * gigabits / on.gigabits}})
	r.addGrowth("CPU for "+what, 0, map[string]figure{
		sideOurs: {Base: 1000 * gigabits * off.cpuPerGbit, Value: 1000 * gigabits * on.cpuPerGbit}})
}

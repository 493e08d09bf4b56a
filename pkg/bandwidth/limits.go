// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// Limits describes one attachment: the requested rates, the applied rates and the measured traffic.
type Limits struct {
	attachment.Key
	Pod  string `json:"pod,omitempty"`
	Gone bool   `json:"gone"` // the pod's namespace and its limits are gone

	Deleted bool `json:"-"` // the node's link of a live pod is missing: only a new pod has one again
	Both[*Direction]
}

// Direction describes the limit of one direction, as seen from the pod, which receives ingress. Applied is nil if the limit is missing in
// the kernel or was removed by an admin, or if the pod is dead.
type Direction struct {
	Asked   Limit
	Applied *kernel.Bucket // the kernel's bucket, with its counters since the limit was set
	Missing string         // description of the missing part
	Bypass  string         // description of another program's filter that takes frames ahead of the limit, or may do so
	Rate    uint64         // average bits per second in the interval
	Dropped uint32         // packets dropped in the interval
}

// MarshalJSON returns the JSON that "podlace limits" prints.
func (d Direction) MarshalJSON() ([]byte, error) {
	shown := struct {
		Asked    Limit  `json:"asked,omitzero"`
		Applied  any    `json:"applied,omitempty"`
		Missing  string `json:"missing,omitempty"`
		Bypass   string `json:"bypass,omitempty"`
		Measured any    `json:"measured,omitempty"`
	}{Asked: d.Asked, Missing: d.Missing, Bypass: d.Bypass}
	if b := d.Applied; b != nil {
		shown.Applied = struct {
			Rate  uint64 `json:"rate"`  // bits per second
			Burst uint32 `json:"burst"` // bytes
			Queue uint32 `json:"queue"` // bytes; for a queue without fair queueing
			Fair  bool   `json:"fair,omitempty"`
		}{b.Rate, b.Burst, b.Limit, b.Fair.Packets > 0}
		shown.Measured = struct {
			Rate         uint64 `json:"rate"`
			Dropped      uint32 `json:"dropped"`
			DroppedTotal uint32 `json:"droppedTotal"`
			Waiting      uint32 `json:"waiting"` // bytes in the queue at the end of the interval
		}{d.Rate, d.Dropped, b.Dropped, b.Waiting}
	}
	return json.Marshal(shown)
}

// Missing reports whether a requested limit is missing in the kernel.
func (l Limits) Missing() bool {
	return l.Ingress != nil && l.Ingress.Missing != "" || l.Egress != nil && l.Egress.Missing != ""
}

// bucketSamples contains the token buckets of all links before and after an interval.
type bucketSamples struct {
	before, after map[int]kernel.Bucket
	began         time.Time
	took          time.Duration
}

// Look returns the recorded limits of attachments with their traffic, which it measures during an interval.
func Look(ctx context.Context, host *kernel.Node, records []attachment.Record, interval time.Duration) ([]Limits, error) {
	if len(records) == 0 {
		return []Limits{}, nil
	}
	before, err := host.Buckets()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(interval):
	}
	after, err := host.Buckets()
	if err != nil {
		return nil, err
	}
	s := bucketSamples{before, after, began, time.Since(began)}
	list := []Limits{}
	for _, rec := range records {
		l, ok, err := s.look(host, rec.Key)
		if err != nil {
			return nil, fmt.Errorf("container %s, %s in network %s: %w", rec.ContainerID, rec.IfName, rec.Network, err)
		}
		if ok {
			list = append(list, l)
		}
	}
	return list, nil
}

// Read returns the recorded limits with the kernel's current counters, without those whose state cannot be decoded. It takes no lock, so it
// may report a limit as missing that an ADD or DEL is changing.
func Read(host *kernel.Node, records []attachment.Record) (list []Limits, err error) {
	if len(records) == 0 {
		return nil, nil
	}
	buckets, err := host.Buckets()
	if err != nil {
		return nil, err
	}
	s := bucketSamples{before: buckets, after: buckets, took: time.Second}
	readable, _ := attachment.States[state](records, nil)
	for _, rec := range readable {
		l, err := s.limits(host, rec)
		if err != nil {
			return nil, fmt.Errorf("container %s, %s in network %s: %w", rec.ContainerID, rec.IfName, rec.Network, err)
		}
		list = append(list, l)
	}
	return list, nil
}

// look returns the limits of one attachment. ok is false if a DEL has removed it during the interval. If a kernel object is missing, look
// reads all of them again under the lock, because an ADD or DEL may be changing them.
func (s bucketSamples) look(host *kernel.Node, key attachment.Key) (l Limits, ok bool, err error) {
	rec, ok, err := attachment.RecordOf[state](key, pluginName)
	if err != nil || !ok {
		return Limits{}, false, err
	}
	if l, err = s.limits(host, rec); err != nil || !l.Missing() {
		return l, err == nil, err
	}
	att, again, ok, err := attachment.Reopen[state](attachment.Waiting, key, pluginName)
	if err != nil || !ok {
		return Limits{}, false, err
	}
	defer att.Close()
	if s.after, err = host.Buckets(); err != nil {
		return Limits{}, false, err
	}
	s.took = time.Since(s.began)
	l, err = s.limits(host, again)
	return l, err == nil, err
}

func (s bucketSamples) limits(host *kernel.Node, rec attachment.Of[state]) (Limits, error) {
	l, st := Limits{Key: rec.Key, Pod: rec.Pod, Gone: plugin.NetnsEnded(rec.Netns)}, rec.State
	if st.Ingress != nil || st.Asked.Ingress.ByAdmin {
		l.Ingress = &Direction{Asked: st.Asked.Ingress}
	}
	if st.Egress != nil || st.Asked.Egress.ByAdmin {
		l.Egress = &Direction{Asked: st.Asked.Egress}
	}
	if l.Gone {
		return l, nil
	}
	link, ok, err := st.hostSide(host)
	if err != nil {
		return l, err
	}
	l.Deleted = !ok
	lost := observedLimit{lost: fmt.Sprintf("link %s is missing", st.Link)}
	of := Both[observedLimit]{lost, lost}
	if ok {
		of, err = st.observe(host, link, bucketsFrom(s.after))
	}
	if st.Ingress != nil {
		l.Ingress.setObserved(s, of.Ingress)
	}
	if st.Egress != nil {
		l.Egress.setObserved(s, of.Egress)
	}
	if st.Egress != nil && err == nil && ok {
		l.Egress.Bypass, err = bypassOf(host, link, of.Egress.link)
	}
	return l, err
}

// setObserved stores what is missing, or else the observed token bucket with its traffic and drops during the interval.
func (d *Direction) setObserved(s bucketSamples, of observedLimit) {
	if d.Missing = of.lost; d.Missing != "" {
		return
	}
	now := of.bucket
	was := s.before[of.link.Index]
	if now.Sent < was.Sent || now.Dropped < was.Dropped { // the bucket was recreated
		was = kernel.Bucket{}
	}
	d.Applied, d.Dropped = &now, now.Dropped-was.Dropped
	d.Rate = uint64(float64(now.Sent-was.Sent) * 8 / s.took.Seconds())
}

// Records returns the records of the bandwidth plugin, which only attachments with limits have.
func Records(of []attachment.Record) []attachment.Record {
	return slices.DeleteFunc(slices.Clone(of), func(rec attachment.Record) bool { return rec.Plugin != pluginName })
}

// Set changes the limits of a live pod in place. The rates are in bits per second: 0 removes the limit, and nil keeps it. The record
// changes too, so that CHECK and Restore use the new limits until another ADD.
func Set(host *kernel.Node, key attachment.Key, ingress, egress *uint64) error {
	att, rec, ok, err := attachment.Reopen[state](attachment.Waiting, key, pluginName)
	if err == nil && !ok {
		err = errors.New("the record is gone: the pod was deleted meanwhile")
	}
	if err != nil {
		return err
	}
	defer att.Close()
	old := rec.State
	if !plugin.NetnsExists(rec.Netns) {
		return fmt.Errorf("namespace %s is gone", rec.Netns)
	}
	link, ok, err := old.hostSide(host)
	if err != nil {
		return err
	}
	if !ok {
		return fmt.Errorf("link %s is missing", old.Link)
	}
	fair, err := host.HasFairQueue()
	if err != nil {
		return err
	}
	next := old
	if ingress != nil {
		next.Asked.Ingress = Limit{Rate: *ingress, ByAdmin: true}
		next.Ingress = next.Asked.Ingress.bucket(link.MTU, next.Latency, fair)
	}
	if egress != nil {
		next.Asked.Egress = Limit{Rate: *egress, ByAdmin: true}
		next.setEgress(key, next.Asked.Egress.bucket(link.MTU, next.Latency, fair))
	}
	_, err = changeLimits(host, att, link, old, next)
	return err
}

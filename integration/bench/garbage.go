// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/attachment"
)

const (
	verbGC        = "GC"
	gcSubnet      = "10.98.0.0/16"
	gcValid       = 10_000
	gcStale       = 1000
	gcRepeats     = 3
	recordsFolder = "/run/podlace"
	validKey      = "cni.dev/valid-attachments"
)

// attached is an attachment in the list of valid ones.
type attached struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifname"`
}

// ledger is a node's state of many attachments of one network: records and leases, copied from those of one real attachment. Stale
// attachments belong to a node whose runtime never called DEL: their namespace and link are gone.
type ledger struct {
	chain  *chain
	record map[string]any // record of the real attachment
	valid  []attached
	stale  []attached
	next   netip.Addr
	leases map[netip.Addr]string // leases that must exist at the end
	names  []string              // records that must exist at the end

	recordFolder, leaseFolder string
}

// measureGC runs one GC of stale attachments among valid ones, and checks that it removed exactly the stale ones.
func (r *report) measureGC(o options, n nodes) {
	stale, valid := o.scaled(gcStale), o.scaled(gcValid)
	l, err := n.newLedger(side{sideOurs, o.plugins}, valid)
	var samples []time.Duration
	for i := 0; i < gcRepeats && err == nil; i++ {
		var took time.Duration
		took, err = l.collect(i, stale)
		samples = append(samples, took)
	}
	if err != nil {
		r.fail("GC", err)
		return
	}
	r.addAbsolute(fmt.Sprintf("GC of %s stale attachments among %s valid ones", thousands(stale), thousands(valid)), gcBar,
		map[string]figure{sideOurs: {Value: p50(samples)}, sideReference: {Note: "has no GC"}})
}

// newLedger attaches one pod and writes the state of the other valid attachments.
func (n nodes) newLedger(side side, valid int) (*ledger, error) {
	c, err := n.chainOf("gc", "node-gc", side, masqueraded(gcSubnet))
	if err != nil {
		return nil, err
	}
	if err := c.run(verbAdd, execute); err != nil {
		return nil, err
	}
	l := &ledger{
		chain: c, valid: []attached{{c.id, podInterface}},
		recordFolder: filepath.Join(recordsFolder, c.network), leaseFolder: filepath.Join(resultsFolder, c.network),
	}
	if l.next, _, err = c.address(); err != nil {
		return nil, err
	}
	data, err := os.ReadFile(l.recordPath(l.valid[0]))
	if err == nil {
		err = json.Unmarshal(data, &l.record)
	}
	if err != nil {
		return nil, fmt.Errorf("record of the real attachment: %w", err)
	}
	for i := range valid - 1 {
		if err := l.write(containerID(fmt.Sprint("valid", i)), c.pod.Path, &l.valid); err != nil {
			return nil, err
		}
	}
	return l, l.note()
}

// note records the current state, which must be the same after each GC.
func (l *ledger) note() (err error) {
	if l.leases, err = leaseFiles(l.leaseFolder); err == nil {
		l.names, err = l.records()
	}
	return err
}

func (l *ledger) recordPath(a attached) string {
	key := attachment.Key{Network: l.chain.network, ContainerID: a.ContainerID, IfName: a.IfName}
	return filepath.Join(l.recordFolder, "bridge-"+key.Hash())
}

func (l *ledger) records() ([]string, error) {
	names, err := filepath.Glob(filepath.Join(l.recordFolder, "bridge-*"))
	if err == nil && len(names) == 0 {
		err = errors.New("no records")
	}
	return names, err
}

// write creates the record and the lease of another attachment. They are an hour old, because GC keeps recent ones.
func (l *ledger) write(id, netns string, list *[]attached) error {
	a := attached{id, podInterface}
	l.next = l.next.Next()
	state, _ := l.record["state"].(map[string]any)
	state = maps.Clone(state)
	state["addresses"], state["index"] = []string{l.next.String() + "/16"}, 1_000_000+len(l.valid)+len(l.stale)
	record := maps.Clone(l.record)
	record["containerID"], record["netns"], record["state"] = id, netns, state
	data, err := json.Marshal(record)
	if err != nil {
		return fmt.Errorf("encode record: %w", err)
	}
	before := time.Now().Add(-time.Hour)
	*list = append(*list, a)
	return errors.Join(
		os.WriteFile(l.recordPath(a), append(data, '\n'), 0o600),
		os.Chtimes(l.recordPath(a), before, before),
		writeLease(l.leaseFolder, l.next, id),
		os.Chtimes(filepath.Join(l.leaseFolder, l.next.String()), before, before),
	)
}

// collect writes the stale attachments, updates the index by an ADD and a DEL, and runs GC.
func (l *ledger) collect(round, stale int) (time.Duration, error) {
	l.stale = nil
	for i := range stale {
		if err := l.write(containerID(fmt.Sprint("stale", round, "-", i)), "/run/netns/gone-"+fmt.Sprint(i), &l.stale); err != nil {
			return 0, err
		}
	}
	warm := *l.chain
	warm.id, warm.plugins = containerID(fmt.Sprint("warm", round)), []pluginConf{{"type": "host-local", "ipam": masqueraded(gcSubnet)["ipam"]}}
	if err := errors.Join(warm.run(verbAdd, execute), warm.run(verbDel, execute)); err != nil {
		return 0, err
	}
	before, err := leaseFiles(l.leaseFolder)
	if err == nil && len(before) != len(l.leases)+stale {
		err = fmt.Errorf("%d leases before GC, want %d", len(before), len(l.leases)+stale)
	}
	if err != nil {
		return 0, err
	}
	gc := *l.chain
	gc.plugins = []pluginConf{l.chain.plugins[0].with("cniVersion", lateVersion).with(validKey, l.valid)}
	var took time.Duration
	err = gc.run(verbGC, func(inv invocation) (out []byte, err error) {
		out, took, err = inv.timed()
		return out, err
	})
	if err != nil {
		return 0, err
	}
	if err := l.exact(); err != nil {
		return took, err
	}
	if linked, err := l.linked(); err != nil || !linked {
		return took, errors.Join(err, errors.New("GC took the link of the valid attachment"))
	}
	return took, nil
}

// exact compares leases and records with those of the valid attachments.
func (l *ledger) exact() error {
	leases, err := leaseFiles(l.leaseFolder)
	if err != nil {
		return err
	}
	names, err := l.records()
	if err != nil {
		return err
	}
	if !maps.Equal(leases, l.leases) {
		return fmt.Errorf("inexact: %d leases after GC, of %d valid attachments", len(leases), len(l.leases))
	}
	if !slices.Equal(names, l.names) {
		return fmt.Errorf("inexact: %d records after GC, of %d valid attachments", len(names), len(l.names))
	}
	return nil
}

// linked reports whether the real attachment still has its interface.
func (l *ledger) linked() (found bool, err error) {
	err = l.chain.pod.Do(func() error {
		data, err := os.ReadFile("/proc/thread-self/net/dev")
		found = strings.Contains(string(data), podInterface+":")
		return err
	})
	return found, err
}

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

// attachmentEntry is an entry of GC's list of valid attachments.
type attachmentEntry struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifname"`
}

// nodeLedger contains records and leases of many attachments, all copied from one real attachment. The stale ones simulate pods whose
// namespace and link are gone without a DEL.
type nodeLedger struct {
	chain  *chain
	record map[string]any // record of the real attachment
	valid  []attachmentEntry
	stale  []attachmentEntry
	next   netip.Addr
	leases map[netip.Addr]string // leases that must exist at the end
	names  []string              // records that must exist at the end

	recordFolder, leaseFolder string
}

// measureGC measures a GC with stale and valid attachments, and checks that it removes exactly the stale ones.
func (r *report) measureGC(o options, n nodes) {
	stale, valid := o.scaledSize(gcStale), o.scaledSize(gcValid)
	l, err := n.newLedger(pluginSet{sideOurs, o.plugins}, valid)
	var samples []time.Duration
	for i := 0; i < gcRepeats && err == nil; i++ {
		var took time.Duration
		took, err = l.runGC(i, stale)
		samples = append(samples, took)
	}
	if err != nil {
		r.fail("GC", err)
		return
	}
	r.addLoad(fmt.Sprintf("GC of %s stale attachments among %s valid ones", thousands(stale), thousands(valid)), 0,
		map[string]figure{sideOurs: {Value: p50(samples)}, sideReference: {Note: "has no GC"}})
}

// newLedger attaches one real pod, and copies its record and lease for each other valid attachment.
func (n nodes) newLedger(side pluginSet, valid int) (*nodeLedger, error) {
	c, err := n.chainOf("gc", "node-gc", side, masqueradedBridge(gcSubnet))
	if err != nil {
		return nil, err
	}
	if err := c.run(verbAdd, executeProcess); err != nil {
		return nil, err
	}
	l := &nodeLedger{
		chain: c, valid: []attachmentEntry{{c.id, podInterface}},
		recordFolder: filepath.Join(recordsFolder, c.network), leaseFolder: filepath.Join(resultsFolder, c.network),
	}
	if l.next, _, err = c.podAddress(); err != nil {
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
		if err := l.writeAttachment(containerID(fmt.Sprint("valid", i)), c.pod.Path, &l.valid); err != nil {
			return nil, err
		}
	}
	return l, l.noteState()
}

// noteState stores the current records and leases, which each GC must leave as they are.
func (l *nodeLedger) noteState() (err error) {
	if l.leases, err = leaseFiles(l.leaseFolder); err == nil {
		l.names, err = l.records()
	}
	return err
}

func (l *nodeLedger) recordPath(a attachmentEntry) string {
	key := attachment.Key{Network: l.chain.network, ContainerID: a.ContainerID, IfName: a.IfName}
	return filepath.Join(l.recordFolder, "bridge-"+key.Hash())
}

func (l *nodeLedger) records() ([]string, error) {
	names, err := filepath.Glob(filepath.Join(l.recordFolder, "bridge-*"))
	if err == nil && len(names) == 0 {
		err = errors.New("no records")
	}
	return names, err
}

// writeAttachment creates the record and lease of another attachment, one hour old because GC keeps recent ones.
func (l *nodeLedger) writeAttachment(id, netns string, list *[]attachmentEntry) error {
	a := attachmentEntry{id, podInterface}
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

// runGC measures GC after it has written the stale attachments.
func (l *nodeLedger) runGC(round, stale int) (time.Duration, error) {
	l.stale = nil
	for i := range stale {
		if err := l.writeAttachment(containerID(fmt.Sprint("stale", round, "-", i)), "/run/netns/gone-"+fmt.Sprint(i), &l.stale); err != nil {
			return 0, err
		}
	}
	before, err := leaseFiles(l.leaseFolder)
	if err == nil && len(before) != len(l.leases)+stale {
		err = fmt.Errorf("%d leases before GC, want %d", len(before), len(l.leases)+stale)
	}
	if err != nil {
		return 0, err
	}
	gc := *l.chain
	gc.plugins = []pluginConf{l.chain.plugins[0].withKey("cniVersion", lateVersion).withKey(validKey, l.valid)}
	var took time.Duration
	err = gc.run(verbGC, func(inv invocation) ([]byte, error) {
		out, one, err := inv.runTimed()
		took = one.wall
		return out, err
	})
	if err != nil {
		return 0, err
	}
	if err := l.checkExact(); err != nil {
		return took, err
	}
	if linked, err := l.isLinked(); err != nil || !linked {
		return took, errors.Join(err, errors.New("GC took the link of the valid attachment"))
	}
	return took, nil
}

// checkExact returns an error unless the node has exactly the leases and records of the valid attachments.
func (l *nodeLedger) checkExact() error {
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

// isLinked reports whether the real attachment's interface still exists.
func (l *nodeLedger) isLinked() (found bool, err error) {
	err = l.chain.pod.Do(func() error {
		data, err := os.ReadFile("/proc/thread-self/net/dev")
		found = strings.Contains(string(data), podInterface+":")
		return err
	})
	return found, err
}

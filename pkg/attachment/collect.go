// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// GC finds a plugin's stale attachments and collects the errors of their removal, none of which stops it.
type GC[T any] struct {
	r    *plugin.Request
	errs []error
}

// NewGC prepares the garbage collection for a GC request.
func NewGC[T any](r *plugin.Request) *GC[T] { return &GC[T]{r: r} }

// Stale yields each stale attachment, locked until the next one, with its recorded state. The caller removes the state and calls Report.
func (g *GC[T]) Stale() iter.Seq2[*Attachment, T] {
	return func(yield func(*Attachment, T) bool) {
		records, err := List(g.r.Network, g.r.Plugin)
		g.errs = append(g.errs, err)
		for _, rec := range records {
			if g.r.Candidate(rec.Attachment()) && !g.yieldStale(rec, yield) {
				return
			}
		}
	}
}

// yieldStale locks the attachment of a listed record and yields it if it is stale. It reads the record again, because another process may
// have changed it.
func (g *GC[T]) yieldStale(listed Record, yield func(*Attachment, T) bool) (more bool) {
	att, rec, found, err := take[T](Waiting, g.r, listed.Key)
	if err != nil {
		g.fail(listed, err)
		return true
	}
	defer att.Close()
	return !found || !g.r.Stale(listed.Attachment(), rec.Netns, rec.Written) || yield(att, rec.State)
}

// Report stores the error of removing an attachment, if there is one.
func (g *GC[T]) Report(att *Attachment, err error) {
	if err != nil {
		g.fail(Record{Key: att.Key, Pod: att.pod}, err)
	}
}

func (g *GC[T]) fail(rec Record, err error) {
	of := "container " + rec.ContainerID + " " + rec.IfName
	if rec.Pod != "" {
		of = "pod " + rec.Pod + ", " + of
	}
	g.r.KeepAttachment(rec.Attachment()) // the attachment's remaining state still uses its addresses
	g.errs = append(g.errs, fmt.Errorf("%s: %w", of, err))
}

// Unreadable yields, and logs, the hash in the file name of each unreadable record that GC may remove, for example one that a newer version
// wrote. The caller removes all state with the hash in its name, and calls ReportUnreadable.
func (g *GC[T]) Unreadable() iter.Seq[string] {
	return func(yield func(string) bool) {
		records, damaged, err := ReadRecords(g.r.Network, g.r.Plugin+"-")
		g.errs = append(g.errs, err)
		for _, rec := range records {
			if _, err := StateOf[T](rec); err != nil {
				damaged = append(damaged, Damaged{g.r.Network, rec.Plugin + "-" + rec.Hash(), err})
			}
		}
		valid, dead := g.hashes(g.r.Valid), g.hashes(g.r.Dead)
		for _, d := range damaged {
			hash, own := strings.CutPrefix(d.Name, g.r.Plugin+"-")
			if !own || !isHash(hash) { // for example a copy of a record
				continue
			}
			if valid[hash] || g.r.Dead != nil && !dead[hash] {
				continue
			}
			g.r.Log.Warn("removing the unreadable record of a stale attachment, and the state that carries its hash",
				"record", d.Path(), "reason", d.Reason)
			if !yield(hash) {
				return
			}
		}
	}
}

func (g *GC[T]) hashes(of map[plugin.Attachment]bool) map[string]bool {
	set := map[string]bool{}
	for a := range of {
		set[Key{g.r.Network, a.ContainerID, a.IfName}.Hash()] = true
	}
	return set
}

// ReportUnreadable stores the error of removing the state of an unreadable record, or deletes the record's file if err is nil. hash is that
// in the file name.
func (g *GC[T]) ReportUnreadable(hash string, err error) {
	if err == nil {
		err = removeFile(g.r.Network, g.r.Plugin+"-"+hash)
	}
	g.errs = append(g.errs, err)
}

// Err returns all errors of this garbage collection, joined.
func (g *GC[T]) Err() error { return errors.Join(g.errs...) }

// isHash reports whether text has the format of a result of Key.Hash.
func isHash(text string) bool {
	sum, err := hex.DecodeString(text)
	return err == nil && len(sum) == 8 && hex.EncodeToString(sum) == text
}

func removeFile(network, name string) error {
	dir, err := store.Open(folder(network))
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Remove(name)
}

// Written returns the time at which the record was last written.
func (a *Attachment) Written() (time.Time, error) { return a.dir.Written(a.file()) }

// Attachment returns the container ID and the interface name of a record.
func (r Record) Attachment() plugin.Attachment {
	return plugin.Attachment{ContainerID: r.ContainerID, IfName: r.IfName}
}

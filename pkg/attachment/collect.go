// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Collect serves GC: Drop for each record of the plugin whose attachment is not valid any more. It goes on after errors.
func Collect[T any](r *plugin.Request, remove func(*Attachment, T) error) error {
	records, err := List(r.Network, r.Plugin)
	if err != nil {
		return err
	}
	var errs []error
	for _, rec := range records {
		if of := rec.Attachment(); r.Candidate(of) {
			// What the list said may be old by the time that the lock is had.
			_, err := dropIf(r, rec.Key, func(now Record, written time.Time) bool { return r.Stale(of, now.Netns, written) }, remove)
			if err != nil {
				r.Spare(of) // what it has left keeps its addresses
			}
			errs = append(errs, wrap(rec, err))
		}
	}
	return errors.Join(errs...)
}

// CollectUnreadable serves GC for records that cannot be read, such as those of a newer version: remove gets the hash of each key that is
// of no attachment to keep, and takes away what can be found by it.
func CollectUnreadable(r *plugin.Request, remove func(hash string) error) error {
	_, unreadable, err := read(r.Network, r.Plugin+"-")
	errs := []error{err}
	hashes := func(of map[plugin.Attachment]bool) map[string]bool {
		set := map[string]bool{}
		for a := range of {
			set[Key{r.Network, a.ContainerID, a.IfName}.Hash()] = true
		}
		return set
	}
	var valid, dead map[string]bool
	for _, name := range unreadable {
		hash, own := strings.CutPrefix(name, r.Plugin+"-")
		if !own || !isHash(hash) { // such as the copy of a record beside it
			continue
		}
		if valid == nil {
			valid, dead = hashes(r.Valid), hashes(r.Dead)
		}
		if valid[hash] || r.Dead != nil && !dead[hash] {
			continue
		}
		err := remove(hash)
		if err == nil {
			err = forget(r.Network, name)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// isHash tells whether text is as Key.Hash writes it.
func isHash(text string) bool {
	sum, err := hex.DecodeString(text)
	return err == nil && len(sum) == 8 && hex.EncodeToString(sum) == text
}

func forget(network, name string) error {
	dir, err := store.Open(folder(network))
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Remove(name)
}

// DropDead removes an attachment of the network of r if its namespace is gone.
func DropDead[T any](r *plugin.Request, of plugin.Attachment, remove func(*Attachment, T) error) (found bool, err error) {
	k := Key{r.Network, of.ContainerID, of.IfName}
	return dropIf(r, k, func(now Record, _ time.Time) bool { return plugin.NetnsGone(now.Netns) }, remove)
}

func dropIf[T any](r *plugin.Request, k Key, when func(Record, time.Time) bool, remove func(*Attachment, T) error) (found bool, err error) {
	dropped := false
	_, err = drop(r, k, func(a *Attachment, state T) error {
		rec, err := readRecord(a.dir, a.file())
		if err != nil || !when(rec, rec.Written) {
			return err
		}
		dropped = true
		return remove(a, state)
	}, func(*Attachment) error { return nil })
	return dropped, err
}

// Written returns when the record was last written.
func (a *Attachment) Written() (time.Time, error) { return a.dir.Written(a.file()) }

func wrap(rec Record, err error) error {
	if err == nil {
		return nil
	}
	of := "container " + rec.ContainerID + " " + rec.IfName
	if rec.Pod != "" {
		of = "pod " + rec.Pod + ", " + of
	}
	return fmt.Errorf("%s: %w", of, err)
}

// Attachment returns the interface that a record is about.
func (r Record) Attachment() plugin.Attachment {
	return plugin.Attachment{ContainerID: r.ContainerID, IfName: r.IfName}
}

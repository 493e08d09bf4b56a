// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"encoding/json"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Take locks the attachment of a DEL request and returns its recorded state. The lock is taken even if found is false for lack of a record,
// so that DEL does not remove the changes of a concurrent ADD. The caller removes the attachment's state, calls Remove, and closes the
// attachment. If the network has no folder of records, att is nil; Close, Remove and RemoveWithLink are no-ops then.
func Take[T any](r *plugin.Request) (att *Attachment, state T, found bool, err error) {
	att, rec, found, err := take[T](Waiting, r, KeyOf(r))
	return att, rec.State, found, err
}

// TakeDead is Take for another attachment in the request's network. found is false without a record, or if the recorded namespace still
// exists.
func TakeDead[T any](r *plugin.Request, of plugin.Attachment) (att *Attachment, state T, found bool, err error) {
	att, rec, found, err := take[T](Waiting, r, Key{r.Network, of.ContainerID, of.IfName})
	if err != nil || !found || !plugin.NetnsGone(rec.Netns) {
		att.Close()
		return nil, state, false, err
	}
	return att, rec.State, true, nil
}

func take[T any](l Locker, r *plugin.Request, k Key) (att *Attachment, rec Of[T], found bool, err error) {
	dir, err := store.Open(folder(k.Network))
	if err != nil {
		return nil, rec, false, ignoreMissing(err)
	}
	if att, err = l.lock(dir, k, r); err != nil {
		return nil, rec, false, err
	}
	if rec.Record, found, err = att.load(&rec.State); err != nil {
		att.Close()
		return nil, rec, false, err
	}
	if found {
		att.pod, att.netns = rec.Pod, rec.Netns
	}
	return att, rec, found, nil
}

// Reopen locks an attachment and returns the plugin's current record, which may have changed since it was listed. ok is false if it is
// gone.
func Reopen[T any](l Locker, k Key, name string) (a *Attachment, rec Of[T], ok bool, err error) {
	a, rec, ok, err = take[T](l, &plugin.Request{Plugin: name}, k)
	if !ok {
		a.Close()
		return nil, rec, false, err
	}
	return a, rec, true, nil
}

// Of is a record with its decoded state.
type Of[T any] struct {
	Record
	State T
}

// StateOf decodes the state in a record.
func StateOf[T any](rec Record) (st T, err error) {
	err = json.Unmarshal(rec.State, &st)
	return st, err
}

// States decodes the states in the records that List or AllOf returned. It leaves out a record whose state has another format.
func States[T any](records []Record, err error) ([]Of[T], error) {
	var all []Of[T]
	for _, rec := range records {
		if st, err := StateOf[T](rec); err == nil {
			all = append(all, Of[T]{rec, st})
		}
	}
	return all, err
}

// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"fmt"
	"reflect"
	"strings"
)

// ChangeKind says what became of a device.
type ChangeKind string

// Kinds of changes.
const (
	Added   ChangeKind = "added"
	Removed ChangeKind = "removed"
	Changed ChangeKind = "changed"
)

// Change is what became of a device from one snapshot to the next. NUMA nodes that changed have no address.
type Change struct {
	Kind     ChangeKind `json:"kind"`
	Address  Address    `json:"address,omitzero"`
	Fields   []string   `json:"fields,omitempty"` // what changed, by its name in JSON, in the order of Device
	Old, New Device     `json:"-"`
}

// Has tells whether a field changed, by its name in JSON.
func (c Change) Has(field string) bool {
	for _, f := range c.Fields {
		if f == field {
			return true
		}
	}
	return false
}

// String is a line for a log: 0000:3b:10.2 changed: driver iavf, now vfio-pci.
func (c Change) String() string {
	if !c.Address.IsValid() {
		return "NUMA nodes changed"
	}
	if c.Kind != Changed {
		return fmt.Sprintf("%s %s", c.Address, c.Kind)
	}
	var parts []string
	from, to := reflect.ValueOf(c.Old), reflect.ValueOf(c.New)
	for i := range from.NumField() {
		if name := fieldName(from.Type().Field(i)); c.Has(name) {
			parts = append(parts, fmt.Sprintf("%s %v, now %v", name, shown(from.Field(i)), shown(to.Field(i))))
		}
	}
	return fmt.Sprintf("%s changed: %s", c.Address, strings.Join(parts, "; "))
}

func shown(v reflect.Value) any {
	if v.IsZero() && v.Kind() != reflect.Bool && !v.CanInt() && !v.CanUint() {
		return "none"
	}
	return v.Interface()
}

// Diff returns what changed between two snapshots, by address; nil stands for nothing at all.
func Diff(from, to *Snapshot) (changes []Change) {
	if from == nil {
		from = &Snapshot{}
	}
	if to == nil {
		to = &Snapshot{}
	}
	was, is := from.Devices, to.Devices
	for len(was) > 0 || len(is) > 0 {
		switch order := first(was, is); {
		case order < 0:
			changes = append(changes, Change{Kind: Removed, Address: was[0].Address, Old: was[0]})
			was = was[1:]
		case order > 0:
			changes = append(changes, Change{Kind: Added, Address: is[0].Address, New: is[0]})
			is = is[1:]
		default:
			if fields := differing(was[0], is[0]); len(fields) > 0 {
				changes = append(changes, Change{Kind: Changed, Address: is[0].Address, Fields: fields, Old: was[0], New: is[0]})
			}
			was, is = was[1:], is[1:]
		}
	}
	if len(from.Nodes)+len(to.Nodes) > 0 && !reflect.DeepEqual(from.Nodes, to.Nodes) {
		changes = append(changes, Change{Kind: Changed, Fields: []string{"nodes"}})
	}
	return changes
}

// first tells in which of two sorted lists, of which one may be empty, the next device is: the left below 0, the right above, both 0.
func first(left, right []Device) int {
	if len(left) == 0 {
		return 1
	}
	if len(right) == 0 {
		return -1
	}
	return left[0].Address.Compare(right[0].Address)
}

// differing returns the fields in which two devices differ; none is as good as an empty list.
func differing(a, b Device) (fields []string) {
	from, to := reflect.ValueOf(a), reflect.ValueOf(b)
	for i := range from.NumField() {
		v, w := from.Field(i), to.Field(i)
		if v.Kind() == reflect.Slice && v.Len()+w.Len() == 0 || reflect.DeepEqual(v.Interface(), w.Interface()) {
			continue
		}
		fields = append(fields, fieldName(from.Type().Field(i)))
	}
	return fields
}

func fieldName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return name
}

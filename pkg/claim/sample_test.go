// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestSample checks testdata/format1.json, a record of format 1 with all keys. It never changes, because released programs left such
// records on nodes: a further key needs a new format number with a sample of its own.
func TestSample(t *testing.T) {
	folder := t.TempDir()
	sample, err := os.ReadFile("testdata/format1.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "UID"), sample, 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := Read(folder, "UID")
	if err != nil {
		t.Fatal(err)
	}
	var all Record
	fill(t, reflect.ValueOf(&all).Elem(), "")
	all.Format, all.State, all.Bound[0].ID = format, Prepared, all.Devices[0].ID
	all.Devices[0].Claim.Admin = false // who has administrative access only binds no driver
	if diff := cmp.Diff(all, r); diff != "" {
		t.Errorf("-all keys +sample\n%s", diff)
	}
	if err := Write(folder, all); err != nil {
		t.Fatal(err)
	}
	written, err := os.ReadFile(filepath.Join(folder, "UID"))
	if diff := cmp.Diff(string(sample), string(written)); diff != "" || err != nil {
		t.Errorf("-sample +written %v\n%s", err, diff)
	}
}

// fill gives each stored field of a record a value: its name, 1, or true.
func fill(t *testing.T, v reflect.Value, name string) {
	t.Helper()
	if v.Type() == reflect.TypeFor[time.Time]() {
		v.Set(reflect.ValueOf(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(name)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(1)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem(), name)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(t, v.Index(0), name)
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.Tag.Get("json") != "-" {
				fill(t, v.Field(i), f.Name)
			}
		}
	default:
		t.Fatalf("%s has the kind %s", name, v.Kind())
	}
}

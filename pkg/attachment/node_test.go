// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"fmt"
	"net/netip"
	"reflect"
	"testing"
	"time"
)

// Reopen reads the record under the lock, and a later Save keeps its pod and namespace.
func TestReopen(t *testing.T) {
	key := Key{t.Name(), "id", "eth0"}
	if _, _, ok, err := Reopen[testState](Waiting, key, "test"); ok || err != nil {
		t.Errorf("without a folder: %t, %v", ok, err)
	}
	a, r := attach(t, "id")
	if err := a.Save(testState{"x"}); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		b, rec, ok, err := Reopen[testState](Waiting, key, "test")
		if err == nil && (!ok || rec.State != (testState{"y"}) || rec.Key != key) {
			err = fmt.Errorf("%t, %+v", ok, rec)
		}
		if err == nil {
			err = b.Save(testState{"z"})
			b.Close()
		}
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatalf("it did not wait for the lock: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	if err := a.Save(testState{"y"}); err != nil {
		t.Fatal(err)
	}
	a.lock.Unlock()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	got, err := List(r.Network, "test")
	if err != nil || len(got) != 1 || string(got[0].State) != `{"value":"z"}` || got[0].Pod != "shop/web-0" || got[0].Netns != "/run/netns/x" {
		t.Errorf("%+v, %v", got, err)
	}
	for i := range 2 { // first with another plugin's record, then without any record
		if _, _, ok, err := Reopen[testState](Waiting, key, []string{"other", "test"}[i]); ok || err != nil {
			t.Errorf("%t, %v", ok, err)
		}
		if err := a.Remove(); err != nil {
			t.Fatal(err)
		}
	}
	free, err := Waiting.Key(key)
	if err != nil {
		t.Fatal(err)
	}
	free.Close()
}

// A record lists the addresses of the attachment's interface, and those of each VF.
func TestAddresses(t *testing.T) {
	p := netip.MustParsePrefix
	rec := Record{Key: Key{IfName: "eth0"}, State: []byte(`{"unfinished":true,"addresses":["10.0.0.2/24"],
		"vfs":[{"name":"eth0","addresses":["10.0.0.3/24"]},{"name":"net1","addresses":["10.0.0.4/24","fd00::4/64"]}]}`)}
	want := map[string][]netip.Prefix{"eth0": {p("10.0.0.2/24"), p("10.0.0.3/24")}, "net1": {p("10.0.0.4/24"), p("fd00::4/64")}}
	if got := rec.Addresses(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
}

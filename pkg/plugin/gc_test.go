// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// gcRequest returns a GC request that starts at the current time and has the valid attachment ("b", "eth0").
func gcRequest(dead map[Attachment]bool) *Request {
	r := &Request{Valid: map[Attachment]bool{{"b", "eth0"}: true}, listed: 1, Dead: dead, began: time.Now(),
		Config: []byte(`{"name":"net","cni.dev/valid-attachments":[{"containerID":"b","ifname":"eth0"}]}`)}
	r.log = &strings.Builder{}
	r.Log = r.logger()
	return r
}

// An attachment is stale if the list of valid ones lacks it and it is older than graceTime, since its ADD may still be running (C-85).
func TestStale(t *testing.T) {
	const alive, gone = "/proc/self/ns/net", "/nonexistent"
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	a := Attachment{"a", "eth0"}
	named := map[Attachment]bool{a: true, {"b", "eth0"}: true}
	for name, c := range map[string]struct {
		of    Attachment
		dead  map[Attachment]bool
		netns string
		age   time.Duration
		want  bool
	}{
		"valid":                               {Attachment{"b", "eth0"}, nil, gone, time.Hour, false},
		"another interface of one valid":      {Attachment{"b", "net1"}, nil, alive, time.Hour, true},
		"old, alive":                          {a, nil, alive, time.Minute, true},
		"just made, alive":                    {a, nil, alive, graceTime / 2, false},
		"made since GC began":                 {a, nil, alive, -time.Minute, false},
		"just made, namespace not known":      {a, nil, "", graceTime / 2, false},
		"just made, path is no namespace now": {a, nil, plain, graceTime / 2, false},
		"just made, gone":                     {a, nil, gone, graceTime / 2, true},
		"made in the future: clock was set":   {a, nil, alive, -48 * time.Hour, true},
		"named, gone":                         {a, named, gone, 0, true},
		"named, path is no namespace":         {a, named, plain, 0, true},
		"named, alive again":                  {a, named, alive, time.Hour, false},
		"named and valid":                     {Attachment{"b", "eth0"}, named, gone, time.Hour, false},
		"not named":                           {a, map[Attachment]bool{}, gone, time.Hour, false},
	} {
		r := gcRequest(c.dead)
		if got := r.Stale(c.of, c.netns, r.began.Add(-c.age)); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
		if kept := string(r.ConfigForGC()) != string(r.Config); r.Valid[a] != kept || kept && c.want {
			t.Errorf("%s: among the valid: %v, kept: %v", name, r.Valid[a], kept)
		}
	}
}

// ConfigForGC lists attachments as valid for which Stale returned false.
func TestConfigForGC(t *testing.T) {
	r := gcRequest(nil)
	if string(r.ConfigForGC()) != string(r.Config) {
		t.Errorf("changed without need: %s", r.ConfigForGC())
	}
	r.Stale(Attachment{"a", "eth0"}, "", r.began)
	keys := map[string]json.RawMessage{}
	if err := json.Unmarshal(r.ConfigForGC(), &keys); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{validKey, legacyKey} {
		valid, err := attachmentSet(key, keys[key], false)
		if diff := cmp.Diff(map[Attachment]bool{{"a", "eth0"}: true, {"b", "eth0"}: true}, valid); diff != "" || err != nil {
			t.Errorf("%s: %v %s", key, err, diff)
		}
	}
	if string(keys["name"]) != `"net"` {
		t.Errorf("the rest of the configuration is lost: %s", r.ConfigForGC())
	}
}

func TestConfigForDel(t *testing.T) {
	r := gcRequest(nil)
	r.Config = []byte(`{"name":"net","ipam":{"type":"x"},"cni.dev/valid-attachments":[],"cni.dev/attachments":[],"podlace/dead-attachments":[]}`)
	if diff := cmp.Diff(`{"ipam":{"type":"x"},"name":"net"}`, string(r.ConfigForDel())); diff != "" {
		t.Error(diff)
	}
	if len(r.Config) < 100 {
		t.Errorf("the request's own configuration is now %s", r.Config)
	}
}

func TestDeadAttachments(t *testing.T) {
	const valid = `"cni.dev/valid-attachments":null,`
	for keys, want := range map[string]map[Attachment]bool{
		valid + `"podlace/dead-attachments":null`: {},
		valid + `"podlace/dead-attachments":[{"containerID":"a","ifname":"eth0"},{"containerID":"old"}]`: {{"a", "eth0"}: true,
			{"old", ""}: true},
	} {
		rec := &recorder{}
		run(rec.plugin(), newEnv("GC"), config(keys)).mustSucceed(t, "")
		if diff := cmp.Diff(want, rec.requests[0].Dead); diff != "" {
			t.Errorf("%s:\n%s", keys, diff)
		}
	}
	for keys, code := range map[string]uint{
		`"podlace/dead-attachments":[]`:                     CodeConfig, // without the list of valid attachments it does not count
		valid + `"podlace/dead-attachments":[{}]`:           CodeConfig,
		valid + `"podlace/dead-attachments":"all"`:          CodeDecode,
		valid + `"podlace/dead-attachments":[{"ifname":1}]`: CodeDecode,
	} {
		rec := &recorder{}
		run(rec.plugin(), newEnv("GC"), config(keys)).mustFail(t, code)
		if len(rec.requests) > 0 {
			t.Errorf("%s reached the plugin", keys)
		}
	}
}

// NetnsVisible returns false if the parent of the path is missing or no folder, but always true below /proc.
func TestNetnsVisible(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]bool{"": true, dir + "/gone": true, dir + "/file": true, dir + "/none/gone": false,
		dir + "/file/gone": false, "/proc/999999999/ns/net": true} {
		if got := NetnsVisible(path); got != want {
			t.Errorf("%q: %t", path, got)
		}
	}
}

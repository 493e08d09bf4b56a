// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// playDemo replaces the demo on one plugin folder. It prints a report whose only row has the conflist, with the result Miss if the folder
// has a file "miss".
func playDemo(args []string) int {
	o, err := parse(args, os.Stderr)
	if err != nil {
		return exitFailed
	}
	row, status := Row{Step: "step", Measured: o.conflist, Result: OK}, 0
	if _, err := os.Stat(filepath.Join(o.plugins, "miss")); err == nil {
		row.Result, status = Miss, exitDiffers
	}
	if _, err := os.Stat(filepath.Join(o.plugins, "broken")); err == nil {
		return exitFailed
	}
	r := Report{Plugins: o.plugins}
	r.add(row)
	_ = json.NewEncoder(os.Stdout).Encode([]Report{r})
	return status
}

func folderWith(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestCompare(t *testing.T) {
	good, bad, broken := folderWith(t), folderWith(t, "miss"), folderWith(t, "broken")
	for name, test := range map[string]struct {
		ours, theirs string
		status       int
	}{
		"only the reference misses": {good, bad, 0},
		"we miss":                   {bad, good, exitDiffers},
		"we cannot run":             {broken, good, exitFailed},
		"the reference cannot run":  {good, broken, exitFailed},
	} {
		var out bytes.Buffer
		o := options{plugins: test.ours, reference: test.theirs, conflist: "some.conflist", json: true}
		status, err := o.run(t.Context(), &out, io.Discard)
		if status != test.status || (err != nil) != (status == exitFailed) {
			t.Errorf("%s: status %d, want %d: %v", name, status, test.status, err)
		}
		if test.status == exitFailed {
			continue
		}
		var got []Report
		if err := json.Unmarshal(out.Bytes(), &got); err != nil || len(got) != 2 {
			t.Fatalf("%s: %v: %s", name, err, &out)
		}
		if got[0].Plugins != test.ours || got[1].Plugins != test.theirs || got[0].Rows[0].Measured != "some.conflist" {
			t.Errorf("%s: got %+v", name, got)
		}
	}
	var out bytes.Buffer
	if _, err := (options{plugins: good, reference: bad}).run(t.Context(), &out, io.Discard); err != nil {
		t.Error(err)
	}
	if !strings.Contains(out.String(), "MISS") || !strings.Contains(out.String(), "podlace: "+good) {
		t.Errorf("table:\n%s", &out)
	}
}

func TestRefused(t *testing.T) {
	dir := t.TempDir()
	for name, test := range map[string]struct {
		o    options
		want string
	}{
		"no plugins":       {options{plugins: dir}, "no executable bandwidth, bridge, host-local, portmap, loopback"},
		"no such conflist": {options{plugins: dir, conflist: filepath.Join(dir, "none")}, "no such file"},
		"no plugins in it": {options{plugins: dir, conflist: folderWithConflist(t, `{"cniVersion":"1.0.0","name":"x"}`)}, "plugins"},
	} {
		status, err := test.o.run(t.Context(), io.Discard, io.Discard)
		if status != exitFailed || err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: status %d, %v", name, status, err)
		}
	}
	if _, err := parse([]string{"now"}, io.Discard); err == nil || !strings.Contains(err.Error(), `"now"`) {
		t.Errorf("a surplus argument: %v", err)
	}
}

func folderWithConflist(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "net.conflist")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// SPDX-License-Identifier: Apache-2.0

package poddevices

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/child"
)

func TestAskKubelet(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		script, says string
		is           error
	}{
		"devices":   {`read line; case $line in *'"pod":"web-0"'*'"folder":"/k"'*) echo '{"devices":[{"id":"a"}]}';; esac`, "", nil},
		"an error":  {`echo '{"error":"who knows: the checkpoint is missing","cause":"the checkpoint is missing"}'`, "who knows: the checkpoint", ErrNoCheckpoint},
		"no answer": {"exit 0", "read a line", nil},
		"half":      {`printf '{"devices":[]'`, "read a line", nil},
		"no JSON":   {"echo hello", "invalid character", nil},
		"a failure": {"echo broken >&2; exit 3", "exit status 3 broken", nil},
		"no end":    {"sleep 60", "no answer in time", child.ErrTimeout},
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, Program), []byte("#!/bin/sh\nPATH=/bin:/usr/bin\n"+c.script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		q := KubeletQuestion{Question: Question{Pod: "web-0"}, Folder: "/k", Timeout: 10 * time.Second}
		if c.is == child.ErrTimeout {
			q.Timeout = 50 * time.Millisecond
		}
		devices, err := AskKubelet([]string{"/nonexistent", dir}, q)
		if c.says == "" {
			if err != nil || len(devices) != 1 || devices[0].ID != "a" {
				t.Errorf("%s: %v, %v", name, devices, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), c.says) || c.is != nil && !errors.Is(err, c.is) || devices != nil {
			t.Errorf("%s: %v, %v", name, devices, err)
		}
	}
	if _, err := AskKubelet([]string{"/nonexistent"}, KubeletQuestion{}); !errors.Is(err, ErrNoProgram) {
		t.Errorf("no program: %v", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestList expects the same rules from List as from iptables-save, and no change of the ruleset.
func TestList(t *testing.T) {
	needIPTables(t)
	kerneltest.EmptyNFT(t)
	t.Setenv("XTABLES_LIBDIR", t.TempDir()) // without modules no rule can be printed
	for _, is4 := range []bool{true, false} {
		empty, err := List(is4, "POSTROUTING", "KT-A")
		if diff := cmp.Diff(Table{"POSTROUTING": nil}, empty); err != nil || diff != "" {
			t.Errorf("an empty table: %v\n%s", err, diff)
		}
	}
	if out, err := exec.Command("nft", "list", "ruleset").Output(); err != nil || len(out) > 0 {
		t.Errorf("List made %s, %v", out, err)
	}
	for _, is4 := range []bool{true, false} {
		kerneltest.Must(t, apply(is4, func(Table) []string {
			return []string{":KT-A - [0:0]", ":KT-B - [0:0]", `-A KT-A -p tcp -m comment --comment "name: \"n\"" -m tcp --dport 80 -j KT-B`,
				"-A POSTROUTING -j KT-A"}
		}))
		want, err := readTable(name(is4), "nat", nil)
		kerneltest.Must(t, err)
		for chain := range want {
			if !strings.HasPrefix(chain, "KT-") && chain != "POSTROUTING" {
				delete(want, chain)
			}
		}
		got, err := List(is4, "POSTROUTING", "KT-A", "KT-B", "KT-NONE")
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%v\n%s", err, diff)
		}
		kerneltest.Must(t, RemoveChain("POSTROUTING", "KT-A"), RemoveChain("POSTROUTING", "KT-B"))
	}
}

// TestListBusy expects a busy error, after which a caller can retry, if a program hangs or waits for a lock.
func TestListBusy(t *testing.T) {
	for what, script := range map[string]string{
		"hangs":                "exec sleep 2",
		"hangs at the version": `test "$1" = --version && exec sleep 2`,
		"lock held":            `test "$1" = --version && echo "iptables v1.8.9 (legacy)" || exit 4`,
	} {
		path := filepath.Join(t.TempDir(), "iptables")
		kerneltest.Must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o755))
		if nat, err := listWithin(time.Second/2, path, "nat", []string{"POSTROUTING"}); !isBusy(err) || nat != nil {
			t.Errorf("%s: %v, %v", what, nat, err)
		}
	}
}

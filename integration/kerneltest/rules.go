// SPDX-License-Identifier: Apache-2.0

package kerneltest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"

	"github.com/podlace/podlace/integration/snapshot"
)

// Must fails the test if one of the given errors is not nil, and logs the first such error.
func Must(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// FlushNFT removes all nf_tables objects, like "nft flush ruleset".
func FlushNFT() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	c.FlushRuleset()
	return c.Flush()
}

// EmptyNFT calls FlushNFT now and when the test ends.
func EmptyNFT(t testing.TB) {
	t.Helper()
	Must(t, FlushNFT())
	t.Cleanup(func() { Must(t, FlushNFT()) })
}

// Records takes a snapshot of the host and returns the lines with all the given texts, without the prefix "host: ".
func Records(t testing.TB, parts ...string) (lines []string) {
	t.Helper()
	s, err := snapshot.Take(snapshot.Options{})
	if err != nil {
		t.Fatal(err)
	}
next:
	for line := range strings.Lines(s.String()) {
		for _, p := range parts {
			if !strings.Contains(line, p) {
				continue next
			}
		}
		lines = append(lines, strings.TrimPrefix(strings.TrimSpace(line), "host: "))
	}
	return lines
}

// Golden compares the chains and rules of an inet nftables table with a golden file in testdata, which it first writes if update is set.
func Golden(t testing.TB, table string, update bool) {
	t.Helper()
	var got strings.Builder
	for _, kind := range []string{"nft chain", "nft rule"} {
		for _, line := range Records(t, kind+" inet "+table+" ") {
			if strings.HasPrefix(line, kind) { // without the hash of their order
				got.WriteString(line + "\n")
			}
		}
	}
	path := filepath.Join("testdata", table+".golden")
	if update {
		if err := os.WriteFile(path, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	Must(t, err)
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got.String(), "\n")); diff != "" {
		dir, err := os.Getwd()
		Must(t, err)
		dir = "pkg/" + filepath.Base(dir)
		t.Errorf("%s/%s is not what the kernel has: correct the rules, or run: go test ./%s -run '^%s$' -update\n(-file +kernel)\n%s", dir, path, dir,
			t.Name(), diff)
	}
}

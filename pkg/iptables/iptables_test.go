// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/store"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

const saved = `# Generated
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [12:720]
:CNI-ABC - [0:0]
:CNI-ABCD - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-ABC
-A PREROUTING -j CNI-ABCD
-A CNI-ABC -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.1.0.5:80
-A CNI-ABC -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.1.0.5:8080
COMMIT
`

func TestNAT(t *testing.T) {
	nat := parse(saved)
	for chain, want := range map[string]bool{"CNI-ABC": true, "CNI-ABCD": true, "CNI-AB": false, "": false, "PREROUTING": true,
		"POSTROUTING": false} {
		if got := nat.HasChain(chain); got != want {
			t.Errorf("%q: %t", chain, got)
		}
	}
	for _, c := range []struct {
		chain string
		parts []string
		want  []string
	}{
		{"PREROUTING", nil, []string{"-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-ABC", "-A PREROUTING -j CNI-ABCD"}},
		{"PREROUTING", []string{"-j CNI-ABC "}, []string{"-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-ABC"}},
		{"PREROUTING", []string{"-j CNI-ABC ", "tcp"}, nil},
		{"CNI-ABC", []string{"--dport 80 "}, []string{"-A CNI-ABC -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.1.0.5:80"}},
		{"CNI-ABC", []string{"--to-destination 10.1.0.5:80 "},
			[]string{"-A CNI-ABC -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.1.0.5:80"}},
		{"CNI-AB", nil, nil},
	} {
		var want []string
		for _, rule := range c.want {
			want = append(want, rule+" ")
		}
		if diff := cmp.Diff(want, nat.Rules(c.chain, c.parts...)); diff != "" {
			t.Errorf("%s %q:\n%s", c.chain, c.parts, diff)
		}
	}
	if (Table{}).HasChain("x") || (Table{}).Rules("x") != nil {
		t.Error("an empty table holds something")
	}
}

func needIPTables(t *testing.T) {
	t.Helper()
	if !Installed(true) || !Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
}

// apply changes the nat table by the lines that lines returns for its current content.
func apply(is4 bool, lines func(Table) []string) error {
	e, err := Open(is4, true)
	if err != nil {
		return err
	}
	defer e.Close()
	return e.Apply(lines(e.NAT()))
}

func TestEdit(t *testing.T) {
	needIPTables(t)
	kerneltest.EmptyNFT(t)
	for _, is4 := range []bool{true, false} {
		edit := func(lines ...string) error {
			return apply(is4, func(Table) []string { return lines })
		}
		kerneltest.Must(t, edit(), RemoveChain("POSTROUTING", "KT-A"))
		kerneltest.Must(t, edit(":KT-A - [0:0]", ":KT-B - [0:0]", "-A KT-A -p tcp -j ACCEPT", "-A POSTROUTING -j KT-A", "-A POSTROUTING -j KT-A",
			"-A POSTROUTING -p udp -j KT-B"))
		// if one line is invalid, the lines before it have no effect
		if err := edit("-A KT-A -p udp -j ACCEPT", "-A KT-A -j NOSUCHCHAIN"); err == nil || !strings.Contains(err.Error(), name(is4)+"-restore") {
			t.Errorf("got %v", err)
		}
		nat, err := readTable(name(is4), "nat", nil)
		kerneltest.Must(t, err)
		if len(nat.Rules("KT-A")) != 1 || len(nat.Rules("POSTROUTING", "-j KT-A ")) != 2 {
			t.Errorf("got %q", nat)
		}
		kerneltest.Must(t, RemoveChain("POSTROUTING", "KT-A"))
		nat, err = readTable(name(is4), "nat", nil)
		kerneltest.Must(t, err)
		if nat.HasChain("KT-A") || !nat.HasChain("KT-B") || len(nat.Rules("POSTROUTING")) != 1 {
			t.Errorf("left %q", nat)
		}
		kerneltest.Must(t, RemoveChain("POSTROUTING", "KT-B"))
	}
}

// TestEditParallel: several processes change the table, and none loses its chain, because a lock covers both read and write.
func TestEditParallel(t *testing.T) {
	needIPTables(t)
	kerneltest.EmptyNFT(t)
	var group sync.WaitGroup
	for i := range 6 {
		group.Go(func() {
			err := apply(true, func(nat Table) []string {
				lines := []string{fmt.Sprintf("-A KT-SHARED -p tcp --dport %d -j ACCEPT", 1000+i)}
				if !nat.HasChain("KT-SHARED") {
					lines = append([]string{":KT-SHARED - [0:0]"}, lines...)
				}
				return lines
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	nat, err := readTable(name(true), "nat", nil)
	kerneltest.Must(t, err)
	if n := len(nat.Rules("KT-SHARED")); n != 6 {
		t.Errorf("%d of 6 rules are there: %q", n, nat)
	}
}

func TestMissingProgram(t *testing.T) {
	_, err := lookPath("iptables-none")
	var missing *MissingProgram
	if !errors.As(err, &missing) || err.Error() != "iptables-none is not installed" {
		t.Errorf("got %v", err)
	}
}

// TestOpenBusy expects a busy error at once, without a wait, while another Edit holds the lock.
func TestOpenBusy(t *testing.T) {
	needIPTables(t)
	kerneltest.EmptyNFT(t)
	holder, err := Open(true, true)
	kerneltest.Must(t, err)
	defer holder.Close()
	failed := make(chan error, 1)
	go func() {
		e, err := Open(true, false)
		if err == nil {
			e.Close()
		}
		failed <- err
	}()
	select {
	case err := <-failed:
		var busy interface{ Busy() bool }
		if !errors.As(err, &busy) || !busy.Busy() {
			t.Errorf("got %v", err)
		}
	case <-time.After(store.NodeLockTimeout / 2):
		t.Error("it waits for the lock")
	}
}

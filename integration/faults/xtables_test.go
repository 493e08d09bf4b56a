// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// TestXTables: the node has iptables-legacy and iptables-nft, which other programs use at the same time. Once accessed, the legacy tables
// stay loaded in the network namespace.
func TestXTables(t *testing.T) {
	t.Run("F-20 iptables and backend changed between ADD and DEL", testFlavours)
	t.Run("F-22 xtables lock held, iptables-legacy", testXTablesLock)
	t.Run("F-22 xtables lock held, iptables-nft", testXTablesLockNFT)
}

// switchIPTables returns a function that selects iptables-legacy or iptables-nft in this mount namespace, as update-alternatives(1) does.
func switchIPTables(t *testing.T) (choose func(flavour string)) {
	t.Helper()
	harness.Program(t, "iptables-legacy")
	harness.Program(t, "iptables-nft")
	const folder = "/etc/alternatives"
	if to, err := os.Readlink("/usr/sbin/iptables-restore"); err != nil || filepath.Dir(to) != folder {
		t.Skipf("SKIPPED: iptables is not chosen by %s: %s %v", folder, to, err)
	}
	if out, err := exec.Command("iptables-legacy", "-t", "nat", "-S").CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: this kernel has no ip_tables: %s", bytes.TrimSpace(out))
	}
	if _, err := os.ReadFile("/proc/thread-self/net/ip_tables_names"); err != nil {
		t.Skip("SKIPPED: the kernel hides the names of legacy tables from an ordinary user")
	}
	dir := t.TempDir()
	harness.Shell(t, fmt.Sprintf("cp -dR %s/. %s; mount --bind %[2]s %[1]s", folder, dir))
	t.Cleanup(func() { harness.Shell(t, "umount "+folder) })
	return func(flavour string) {
		t.Helper()
		for _, family := range []string{"iptables", "ip6tables"} {
			for _, tool := range []string{"", "-save", "-restore"} {
				harness.Shell(t, fmt.Sprintf("ln -sfn /usr/sbin/%s-%s%s %s/%[1]s%[3]s", family, flavour, tool, folder))
			}
		}
	}
}

// testFlavours changes the iptables program and the backend between ADD and DEL, which leaves nothing.
func testFlavours(t *testing.T) {
	choose := switchIPTables(t)
	s := newSweep(t, "nftables")
	iptables, err := harness.OpenNetwork(harness.ChainOf(t, "1.1.0", "iptables"), s.cacheDir, nil)
	if err != nil {
		t.Fatal(err)
	}
	type node struct {
		flavour, backend string
		*harness.Network
	}
	legacy, nft, tables := node{"legacy", "iptables", iptables}, node{"nft", "iptables", iptables}, node{"nft", "nftables", s.Network}
	for _, n := range []node{legacy, nft} { // the first pod's shared state stays, in each network
		choose(n.flavour)
		pod := harness.NewPod(t, "first-"+n.flavour)
		n.Must(t, "ADD", harness.Attachment(pod, pod.Name, harness.Capabilities()))
		n.Must(t, "DEL", harness.Attachment(pod, pod.Name, harness.Capabilities()))
	}
	// Networks without pods still have rules, which `podlace reload` removes.
	if err := doMeanwhile(t, nft.Network, "reload"); err != nil {
		t.Fatal(err)
	}
	s.settleNode(t)
	for _, x := range []struct{ add, del node }{{legacy, nft}, {nft, legacy}, {legacy, tables}, {nft, tables}, {tables, legacy}} {
		for _, between := range []string{"nothing", "STATUS", "ADD", "reload"} {
			title := fmt.Sprintf("ADD with %s %s, %s, DEL with %s %s", x.add.backend, x.add.flavour, between, x.del.backend, x.del.flavour)
			s.tryCase(t, title, func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
				choose(x.add.flavour)
				if _, err := x.add.Do("ADD", rt, nil); err != nil {
					return err
				}
				choose(x.del.flavour)
				if err := doMeanwhile(t, x.del.Network, between); err != nil {
					return fmt.Errorf("%s: %w", between, err)
				}
				if between == "reload" && x.add.backend == x.del.backend {
					if _, err := x.del.Do("CHECK", rt, nil); err != nil {
						return err
					}
				}
				_, err := x.del.Do("DEL", rt, nil)
				choose("nft")
				return err
			})
		}
	}
	s.Report(t)
}

// doMeanwhile runs STATUS, `podlace reload`, or ADD and DEL of another pod, all of which may write the rules of all pods again.
func doMeanwhile(t *testing.T, n *harness.Network, what string) error {
	t.Helper()
	switch what {
	case "STATUS":
		_, err := n.Do(what, nil, nil)
		return err
	case "ADD":
		other := harness.NewPod(t, "meanwhile")
		defer other.Close()
		rt := harness.Attachment(other, "meanwhile", harness.Mappings(harness.Port(8081, 80, "tcp")))
		_, err := n.Do("ADD", rt, nil)
		_, err2 := n.Do("DEL", rt, nil)
		return errors.Join(err, err2)
	case "reload":
		return exec.Command(filepath.Join(harness.BinDir(), "podlace"), "reload").Run()
	}
	return nil
}

// xtablesLock is the lock file of iptables-legacy.
const xtablesLock = "/run/xtables.lock"

// onlyPortmap returns a killSweep in whose chain only portmap uses iptables.
func onlyPortmap(t *testing.T) *killSweep {
	t.Helper()
	s := newSweep(t, "nftables")
	conflist := bytes.Replace(s.conflist, []byte(`"backend":"nftables"`), []byte(`"backend":"iptables"`), 1)
	var err error
	if s.Network, err = harness.OpenNetwork(conflist, s.cacheDir, nil); err != nil {
		t.Fatal(err)
	}
	s.settleNode(t)
	return s
}

// testXTablesLock runs verbs while another program holds the xtables lock. ADD and DEL wait for a limited time and return code 11 (try
// again later). The failed ADD leaves no state, so its DEL needs no lock and does not wait.
func testXTablesLock(t *testing.T) {
	choose := switchIPTables(t)
	choose("legacy")
	defer choose("nft")
	s := onlyPortmap(t)
	locked := func(verb string, rt *libcni.RuntimeConf) error {
		_, err := s.Do(verb, rt, nil)
		var refused *types.Error
		if !errors.As(err, &refused) || refused.Code != types.ErrTryAgainLater || !strings.Contains(refused.Msg, "xtables lock") {
			return fmt.Errorf("%s while the lock is held: %w", verb, err)
		}
		return nil
	}
	s.tryCase(t, "lock held in ADD", func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
		defer harness.HoldLock(t, xtablesLock)()
		err := locked("ADD", rt)
		_, err2 := s.Do("DEL", rt, nil)
		return errors.Join(err, err2)
	})
	s.tryCase(t, "lock held in DEL", func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
		_, err := s.Do("ADD", rt, nil)
		free := harness.HoldLock(t, xtablesLock)
		err = errors.Join(err, locked("DEL", rt))
		free()
		_, err2 := s.Do("DEL", rt, nil)
		return errors.Join(err, err2)
	})
	s.Report(t)
}

// testXTablesLockNFT: all verbs succeed while another program holds the xtables lock, because iptables-nft never takes it.
func testXTablesLockNFT(t *testing.T) {
	switchIPTables(t)("nft")
	s := onlyPortmap(t)
	defer harness.HoldLock(t, xtablesLock)()
	s.tryCase(t, "lock held", func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
		_, err := s.Do("ADD", rt, nil)
		_, err2 := s.Do("CHECK", rt, nil)
		_, err3 := s.Do("DEL", rt, nil)
		return errors.Join(err, err2, err3)
	})
	s.Report(t)
}

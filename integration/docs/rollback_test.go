// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/nft"
)

// runRollback returns the output of podlace rollback with the network's configuration.
func runRollback(t *testing.T, n testNetwork, flags ...string) (string, error) {
	t.Helper()
	return rollbackBy(t, harness.BinDir(), n, nil, flags...)
}

func rollbackBy(t *testing.T, bin string, n testNetwork, env []string, flags ...string) (string, error) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "10-mixed.conflist"), n.list.Bytes, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(bin, "podlace"), append([]string{"rollback", "--conf-dir", dir}, flags...)...)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func mustRollback(t *testing.T, n testNetwork, flags ...string) string {
	t.Helper()
	out, err := runRollback(t, n, flags...)
	if err != nil {
		t.Fatalf("rollback: %v\n%s", err, out)
	}
	return out
}

// ownTraces matches lines of a snapshot that name an nftables table, folder or file of Podlace.
var ownTraces = regexp.MustCompile(`(?m)^.*(podlace_|/run/podlace).*$`)

// forgetMarks removes earlier tests' rules for the packet mark of masquerade (key markMasqBit). ADD of the first pod with another bit would
// otherwise remove them in the middle of a test.
func forgetMarks() {
	for _, program := range []string{"iptables", "ip6tables"} {
		for _, chain := range []string{"CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ"} {
			_ = exec.Command(program, "-w", "-t", "nat", "-F", chain).Run() // the chains may not exist
		}
	}
}

// TestRollback (F-44): after a rollback, DEL of the reference plugins removes all state of pods that Podlace attached. Traffic continues
// during the rollback and the replacement of the plugins (F-43).
func TestRollback(t *testing.T) {
	reference := needReference(t)
	for i, backends := range []string{"unset", "iptables", "nftables"} {
		t.Run(backends, func(t *testing.T) {
			port := 7300 + i
			edits := withSpoofCheck(backends == "nftables")
			ours := mixedNetwork(t, backends, harness.BinDir(), port, edits...)
			theirs := ours.withPlugins(reference)
			t.Cleanup(func() { ours.removeState(t) })
			peer := newPeer(t)
			forgetMarks()
			createSharedState(t, theirs, ours)
			mustRollback(t, ours, "--yes")
			before := takeSnapshot(t)
			if left := ownTraces.FindString(before.String()); left != "" {
				t.Errorf("after a rollback without pods, this remains: %s", left)
			}

			// ADD of the reference plugin enables route_localnet for good, so set it back to 0.
			if err := os.WriteFile("/proc/sys/net/ipv4/conf/mixed0/route_localnet", []byte("0"), 0o644); err != nil {
				t.Fatal(err)
			}
			old := newPod(t, "old")
			tellAddresses(t, old, net.JoinHostPort(firstAddress(t, ours.mustAdd(t, "old", old)), "80"))
			traffic := startStream(t, old)
			hostPort := net.JoinHostPort(nodeAddresses[0], fmt.Sprint(port))
			running := takeSnapshot(t)
			if out := mustRollback(t, ours); !strings.Contains(out, "pod shop/web-0: container old, eth0 in network mixed\n") ||
				!strings.Contains(out, "Nothing was changed") {
				t.Errorf("the dry run says\n%s", out)
			}
			if out, err := runRollback(t, ours, "--yes", "--bin-dir", harness.BinDir()); err == nil || !strings.Contains(out, "new pods would still be") {
				t.Errorf("while Podlace's plugins are in place: %v\n%s", err, out)
			}
			kerneltest.NoLeak(t, running, oracleOptions())

			for range 2 { // rollback is idempotent
				mustRollback(t, ours, "--yes")
				if left := ownTraces.FindString(takeSnapshot(t).String()); left != "" {
					t.Errorf("after a rollback, this remains: %s", left)
				}
				if checked := strings.Contains(takeSnapshot(t).String(), "nft chain bridge nat cni-br-iface-old-eth0-mac"); checked != (edits != nil) {
					t.Errorf("the reference's rules check MACs: %t", checked)
				}
				traffic.awaitRounds()
				if err := exchangeOnce(peer, hostPort, peerAddresses[0]); err != nil {
					t.Errorf("hostPort: %v", err)
				}
				if c, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", port), trafficLimit); err != nil {
					t.Errorf("hostPort on 127.0.0.1: %v", err)
				} else {
					c.Close()
				}
			}
			fresh := newPod(t, "new")
			other := mixedNetwork(t, backends, reference, port+50, edits...)
			other.mustAdd(t, "new", fresh)
			traffic.awaitRounds()
			other.del(t, "new", fresh)
			traffic.awaitRounds()
			if err := exchangeOnce(peer, hostPort, peerAddresses[0]); err != nil {
				t.Errorf("hostPort after a pod of the reference: %v", err)
			}
			if err := theirs.check(t, "old", old); err == nil || err.Error() != "Limit doesn't match" {
				t.Errorf("CHECK: %v, want only the error of bandwidth, which computes its queue differently", err)
			}
			traffic.stop()
			theirs.del(t, "old", old)
			theirs.del(t, "old", old)
			kerneltest.NoLeak(t, before, oracleOptions())
		})
	}
}

// TestRollbackInterrupted (F-44): one change of the rollback fails, each third one or, with FAULTS=all, each one. Traffic continues, and
// the next run completes the rollback.
func TestRollbackInterrupted(t *testing.T) {
	reference := needReference(t)
	for _, backends := range []string{"unset", "nftables"} {
		t.Run(backends, func(t *testing.T) {
			ours := mixedNetwork(t, backends, harness.BinDir(), 7400)
			theirs := ours.withPlugins(reference)
			t.Cleanup(func() { ours.removeState(t) })
			newPeer(t)
			createSharedState(t, theirs, ours)
			mustRollback(t, ours, "--yes")
			before := takeSnapshot(t)
			pod := newPod(t, "old")
			for n := 1; ; n += harness.Some(3, 1) {
				ours.mustAdd(t, "old", pod)
				traffic := startStream(t, pod)
				out, err := rollbackBy(t, harness.FaultDir(), ours, []string{fmt.Sprint("PODLACE_FAIL_AT=", n)}, "--yes")
				if err != nil && !strings.Contains(out, "injected fault") {
					t.Fatalf("%v\n%s", err, out)
				}
				traffic.awaitRounds()
				mustRollback(t, ours, "--yes")
				traffic.awaitRounds()
				traffic.stop()
				theirs.del(t, "old", pod)
				kerneltest.NoLeak(t, before, oracleOptions())
				if err == nil {
					if n < 8 {
						t.Errorf("there were only %d changes:\n%s", n-1, out)
					}
					return
				}
			}
		})
	}
}

// TestRollbackOfTheDead (F-44): a rollback removes the state of a pod that ended without a DEL, and keeps that of a network whose
// configuration is unknown.
func TestRollbackOfTheDead(t *testing.T) {
	reference := needReference(t)
	ours := mixedNetwork(t, "nftables", harness.BinDir(), 7450)
	theirs := ours.withPlugins(reference)
	t.Cleanup(func() { ours.removeState(t) })
	createSharedState(t, theirs, ours)
	mustRollback(t, ours, "--yes")
	before := takeSnapshot(t)
	pod, live := newPod(t, "old"), newPod(t, "live")
	ours.mustAdd(t, "old", pod)
	mixedNetwork(t, "nftables", harness.BinDir(), 7451).mustAdd(t, "live", live)
	held, err := os.Open(pod.Path) // as if the kernel were slow to delete the interface
	kerneltest.Must(t, err, pod.Close())
	unknown := mixedNetwork(t, "nftables", harness.BinDir(), 7450, `"mixed"`, `"another"`)
	if out, err := runRollback(t, unknown, "--yes"); err == nil ||
		!strings.Contains(out, "no configuration of this network names the plugin bridge") ||
		!strings.Contains(takeSnapshot(t).String(), "podlace_masquerade") {
		t.Errorf("without the configuration: %v\n%s", err, out)
	}
	mustRollback(t, ours, "--yes")
	held.Close()
	theirs.del(t, "old", pod)
	theirs.del(t, "live", live)
	kerneltest.NoLeak(t, before, oracleOptions())
}

func TestTablesNamed(t *testing.T) {
	document := readFile(t, nftablesDocument)
	for _, table := range nft.Tables() {
		if row := fmt.Sprintf("| `%s` | ", table); !strings.Contains(document, row) {
			t.Errorf("%s lacks the table %s of pkg/nft: add the row that begins with %q", nftablesDocument, table, row)
		}
	}
}

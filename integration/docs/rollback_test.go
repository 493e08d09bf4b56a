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
	"github.com/podlace/podlace/pkg/kernel/kerneltest"
	"github.com/podlace/podlace/pkg/nft"
)

// rollback runs podlace rollback with the network's configuration, and returns its output.
func rollback(t *testing.T, n network, flags ...string) (string, error) {
	t.Helper()
	return rollbackBy(t, harness.BinDir(), n, nil, flags...)
}

func rollbackBy(t *testing.T, bin string, n network, env []string, flags ...string) (string, error) {
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

func mustRollback(t *testing.T, n network, flags ...string) string {
	t.Helper()
	out, err := rollback(t, n, flags...)
	if err != nil {
		t.Fatalf("rollback: %v\n%s", err, out)
	}
	return out
}

// ownTraces matches the names of state that only Podlace creates.
var ownTraces = regexp.MustCompile(`(?m)^.*(podlace_|/run/podlace|/\.podlace).*$`)

// forgetMarks removes the markMasqBit rules of earlier tests. Otherwise they would disappear with this test's first pod, which uses
// another bit.
func forgetMarks() {
	for _, program := range []string{"iptables", "ip6tables"} {
		for _, chain := range []string{"CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ"} {
			_ = exec.Command(program, "-w", "-t", "nat", "-F", chain).Run() // the chains may not exist
		}
	}
}

// TestRollback (F-44): after a rollback the reference plugins delete the pods that Podlace attached, and nothing remains. The pods'
// traffic continues meanwhile and while the plugins are exchanged (F-43).
func TestRollback(t *testing.T) {
	reference := needReference(t)
	for i, backends := range []string{"unset", "iptables", "nftables"} {
		t.Run(backends, func(t *testing.T) {
			port := 7300 + i
			edits := withSpoofCheck(backends == "nftables")
			ours := mixed(t, backends, harness.BinDir(), port, edits...)
			theirs := ours.by(reference)
			t.Cleanup(func() { ours.forget(t) })
			peer := newPeer(t)
			forgetMarks()
			warm(t, theirs, ours)
			mustRollback(t, ours, "--yes")
			before := take(t)
			if left := ownTraces.FindString(before.String()); left != "" {
				t.Errorf("after a rollback without pods, this remains: %s", left)
			}

			// The reference's ADD enables this setting permanently. Reset it, as if no reference pod had been attached.
			if err := os.WriteFile("/proc/sys/net/ipv4/conf/mixed0/route_localnet", []byte("0"), 0o644); err != nil {
				t.Fatal(err)
			}
			old := newPod(t, "old")
			tellAddresses(t, old, net.JoinHostPort(address(t, ours.add(t, "old", old)), "80"))
			traffic := startStream(t, old)
			hostPort := net.JoinHostPort(nodeAddresses[0], fmt.Sprint(port))
			running := take(t)
			if out := mustRollback(t, ours); !strings.Contains(out, "pod shop/web-0: container old, eth0 in network mixed\n") ||
				!strings.Contains(out, "Nothing was changed") {
				t.Errorf("the dry run says\n%s", out)
			}
			kerneltest.NoLeak(t, running, watched())

			for range 2 { // rollback is idempotent
				mustRollback(t, ours, "--yes")
				if left := ownTraces.FindString(take(t).String()); left != "" {
					t.Errorf("after a rollback, this remains: %s", left)
				}
				if checked := strings.Contains(take(t).String(), "nft chain bridge nat cni-br-iface-old-eth0-mac"); checked != (edits != nil) {
					t.Errorf("the reference's rules check MACs: %t", checked)
				}
				traffic.awaitRounds()
				if err := once(peer, hostPort, peerAddresses[0]); err != nil {
					t.Errorf("hostPort: %v", err)
				}
				if c, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", port), trafficLimit); err != nil {
					t.Errorf("hostPort on 127.0.0.1: %v", err)
				} else {
					c.Close()
				}
			}
			fresh := newPod(t, "new")
			other := mixed(t, backends, reference, port+50, edits...)
			other.add(t, "new", fresh)
			traffic.awaitRounds()
			other.del(t, "new", fresh)
			traffic.awaitRounds()
			if err := once(peer, hostPort, peerAddresses[0]); err != nil {
				t.Errorf("hostPort after a pod of the reference: %v", err)
			}
			if err := theirs.check(t, "old", old); err == nil || err.Error() != "Limit doesn't match" {
				t.Errorf("CHECK: %v, want only the error of bandwidth, which computes its queue differently", err)
			}
			traffic.stop()
			theirs.del(t, "old", old)
			theirs.del(t, "old", old)
			kerneltest.NoLeak(t, before, watched())
		})
	}
}

// TestRollbackInterrupted (F-44): if any change fails, the pod's traffic continues, and the next run completes the rollback.
func TestRollbackInterrupted(t *testing.T) {
	reference := needReference(t)
	for _, backends := range []string{"unset", "nftables"} {
		t.Run(backends, func(t *testing.T) {
			ours := mixed(t, backends, harness.BinDir(), 7400)
			theirs := ours.by(reference)
			t.Cleanup(func() { ours.forget(t) })
			newPeer(t)
			warm(t, theirs, ours)
			mustRollback(t, ours, "--yes")
			before := take(t)
			pod := newPod(t, "old")
			for n := 1; ; n++ {
				ours.add(t, "old", pod)
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
				kerneltest.NoLeak(t, before, watched())
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

// TestRollbackOfTheDead (F-44): a rollback removes the state of a pod that ended without a DEL, and keeps everything of an unknown
// network.
func TestRollbackOfTheDead(t *testing.T) {
	reference := needReference(t)
	ours := mixed(t, "nftables", harness.BinDir(), 7450)
	theirs := ours.by(reference)
	t.Cleanup(func() { ours.forget(t) })
	warm(t, theirs, ours)
	mustRollback(t, ours, "--yes")
	before := take(t)
	pod, live := newPod(t, "old"), newPod(t, "live")
	ours.add(t, "old", pod)
	mixed(t, "nftables", harness.BinDir(), 7451).add(t, "live", live)
	if err := pod.Close(); err != nil {
		t.Fatal(err)
	}
	unknown := mixed(t, "nftables", harness.BinDir(), 7450, `"mixed"`, `"another"`)
	if out, err := rollback(t, unknown, "--yes"); err == nil ||
		!strings.Contains(out, "no configuration of this network names the plugin bridge") ||
		!strings.Contains(take(t).String(), "podlace_masquerade") {
		t.Errorf("without the configuration: %v\n%s", err, out)
	}
	mustRollback(t, ours, "--yes")
	theirs.del(t, "old", pod)
	theirs.del(t, "live", live)
	kerneltest.NoLeak(t, before, watched())
}

// TestTablesNamed: each document that lists all nftables tables names every table of the registry.
func TestTablesNamed(t *testing.T) {
	for _, table := range nft.Tables() {
		for file, text := range map[string]string{
			nftablesDocument:    fmt.Sprintf("| `%s` | ", table),
			"docs/MIGRATING.md": fmt.Sprintf("sudo nft 'add table %[1]s; delete table %[1]s'\n", table),
		} {
			if data, err := os.ReadFile(filepath.Join("..", "..", file)); err != nil || !strings.Contains(string(data), text) {
				t.Errorf("%s does not have %q (%v)", file, text, err)
			}
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/iptables"
)

const moving = "docs/MOVING.md"

// needReference returns the folder of the reference plugins, or skips the test without nft and iptables, which they need.
func needReference(t *testing.T) string {
	t.Helper()
	dir := harness.ReferenceDir()
	if !harness.Present(dir, "bridge") {
		t.Skip("SKIPPED: the reference plugins could not be built")
	}
	if _, err := exec.LookPath("nft"); err != nil {
		skipMissing(t, "nft")
	}
	if !iptables.Installed(true) || !iptables.Installed(false) {
		skipMissing(t, "iptables")
	}
	return dir
}

// mixedNetwork returns a network for both the reference plugins and Podlace. edits are pairs of a text in the configuration and its
// replacement.
func mixedNetwork(t *testing.T, backends, bin string, hostPort int, edits ...string) testNetwork {
	t.Helper()
	masquerade, ports := "", ""
	if backends != "unset" {
		masquerade, ports = fmt.Sprintf(`"ipMasqBackend": %q,`, backends), fmt.Sprintf(`"backend": %q,`, backends)
	}
	caps := wantedCapabilities()
	caps["portMappings"] = []map[string]any{{"hostPort": hostPort, "containerPort": 80, "protocol": "tcp"}}
	caps["bandwidth"] = map[string]any{"ingressRate": 20_000_000, "ingressBurst": 2_000_000, "egressRate": 20_000_000,
		"egressBurst": 2_000_000}
	return openNetwork(t, strings.NewReplacer(edits...).Replace(`{"cniVersion": "1.0.0", "name": "mixed", "plugins": [
		{"type": "bridge", "bridge": "mixed0", "isDefaultGateway": true, "ipMasq": true, `+masquerade+`
			"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.89.0.0/16"}], [{"subnet": "fd00:89::/64"}]]}},
		{"type": "portmap", `+ports+` "capabilities": {"portMappings": true}},
		{"type": "bandwidth", "capabilities": {"bandwidth": true}}]}`), bin, caps)
}

// TestWhatStays checks the table of remaining state in docs/MOVING.md: Podlace runs ADD and the reference plugins DEL, or the reverse. The
// document's commands must then remove all that remains.
func TestWhatStays(t *testing.T) {
	folders := map[string]string{"reference": needReference(t), "Podlace": harness.BinDir()}
	d := parse(t, moving)
	rows := d.rowsUnder("Changing over a node")
	if len(rows) == 0 {
		t.Fatalf("%s: restore the table below \"Changing over a node\"", moving)
	}
	port := 7000
	for _, row := range rows {
		for _, backends := range backquoted(row[0]) {
			port++
			add := mixedNetwork(t, backends, folders[row[1]], port)
			t.Run(strings.Join([]string{backends, row[1], row[2]}, "/"), func(t *testing.T) {
				checkWhatStays(t, add, add.withPlugins(folders[row[2]]), row[3])
			})
		}
	}
	for _, b := range d.blocksOf("sh") {
		checkTargets(t, b.text, makeTargets(t))
		runCommands(t, b.text, t.TempDir())
	}
	now, err := snapshot.Take(snapshot.Options{Dirs: []string{"/run/podlace", "/var/lib/cni"}})
	if err != nil {
		t.Fatal(err)
	}
	if left := regexp.MustCompile(`(?m)^.*(CNI-|cni_|podlace_|/run/podlace/).*$`).FindAllString(now.String(), -1); len(left) > 0 {
		t.Errorf("%s: its code blocks ```sh leave state behind: add the command that removes it:\n%s", moving, strings.Join(left, "\n"))
	}
}

// checkWhatStays runs ADD in one network and DEL in the other, which has the plugins of the other project, and compares what stays with the
// cell of the table.
func checkWhatStays(t *testing.T, add, del testNetwork, stays string) {
	t.Helper()
	t.Cleanup(func() { add.removeState(t) })
	for name, n := range map[string]testNetwork{"warm1": add, "warm2": del} {
		warm := newPod(t, name)
		n.mustAdd(t, name, warm)
		n.del(t, name, warm)
	}
	// Remove the remaining state of earlier rows, because it would hide the remaining state of this row.
	_ = exec.Command("nft", "delete", "table", "inet", "podlace_loopback").Run()
	_ = os.RemoveAll("/run/podlace/.localhost")
	pod := newPod(t, "stays")
	got := leftoverKinds(t, func() {
		add.mustAdd(t, "stays", pod)
		del.del(t, "stays", pod)
	})
	var want []string
	if stays != "nothing" {
		want = slices.Sorted(slices.Values(strings.Split(stays, ", ")))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s: other state remains than the row names: write %q into its fourth cell, or let DEL remove it\n(-document +found)\n%s", moving,
			strings.Join(got, ", "), diff)
	}
}

// leftoverKinds calls the function f, and returns the remaining state in the words of docs/MOVING.md, such as "ifb device".
func leftoverKinds(t *testing.T, f func()) []string {
	t.Helper()
	options := snapshot.Options{Dirs: []string{"/run/podlace", "/var/lib/cni"},
		Ignore: regexp.MustCompile(`/last_reserved_ip|/podlace_boot|/\.?lock`)}
	before, err := snapshot.Take(options)
	if err != nil {
		t.Fatal(err)
	}
	f()
	time.Sleep(200 * time.Millisecond) // the kernel deletes links with a delay
	after, err := snapshot.Take(options)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for _, line := range snapshot.Diff(before, after) {
		found[documentWord(line)] = true
	}
	return slices.Sorted(maps.Keys(found))
}

// documentWord returns the name that docs/MOVING.md uses for an object in the snapshot. If the document has no name for the object,
// documentWord returns the line of the snapshot.
func documentWord(line string) string {
	for _, kind := range []struct{ pattern, words string }{
		{` dev bwp| link bwp`, "ifb device"},
		{`CNI-DN-|CNI-HOSTPORT`, "iptables hostPort rules"},
		{`CNI-[0-9a-f]{24}`, "iptables masquerade rules"},
		{` cni_hostport `, "nftables hostPort rules"},
		{` cni_plugins_masquerade `, "nftables masquerade rules"},
		{` element inet podlace_hostport `, "elements of podlace_hostport"},
		{` inet podlace_loopback`, "podlace_loopback"}, {`/run/podlace/.localhost`, "records"},
		{`file /run/podlace/`, "records"},
	} {
		if regexp.MustCompile(kind.pattern).MatchString(line) {
			return kind.words
		}
	}
	return line
}

// TestSideBySide checks pods of Podlace and pods of the reference plugins on the same bridge. The pods must have different addresses and
// reach one another.
func TestSideBySide(t *testing.T) {
	theirs := mixedNetwork(t, "nftables", needReference(t), 7100)
	ours := mixedNetwork(t, "nftables", harness.BinDir(), 7101).withPlugins(harness.BinDir())
	theirs.removeState(t)
	t.Cleanup(func() { theirs.removeState(t) })
	old, fresh := newPod(t, "old"), newPod(t, "new")
	from := firstAddress(t, theirs.mustAdd(t, "old", old))
	to := firstAddress(t, ours.mustAdd(t, "new", fresh))
	if from == to {
		t.Errorf("both have %s", from)
	}
	var listener net.Listener
	err := fresh.Do(func() (err error) {
		listener, err = net.Listen("tcp", net.JoinHostPort(to, "80"))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	err = old.Do(func() error {
		conn, err := net.DialTimeout("tcp", listener.Addr().String(), time.Minute)
		if err == nil {
			err = conn.Close()
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	theirs.withPlugins(harness.BinDir()).del(t, "old", old)
	ours.del(t, "new", fresh)
	leases, err := filepath.Glob("/var/lib/cni/networks/mixed/*[.:]*[0-9]")
	if err != nil {
		t.Fatal(err)
	}
	if leases = slices.DeleteFunc(leases, func(s string) bool { return strings.Contains(s, "last_reserved") }); len(leases) > 0 {
		t.Errorf("leases that stay: %s", leases)
	}
}

// firstAddress returns the first address in the result of ADD.
func firstAddress(t *testing.T, text []byte) string {
	t.Helper()
	var result struct{ IPs []struct{ Address string } }
	if err := json.Unmarshal(text, &result); err != nil {
		t.Fatal(err)
	}
	addr, _, _ := strings.Cut(result.IPs[0].Address, "/")
	return addr
}

// SPDX-License-Identifier: Apache-2.0

package kernels

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/kernel"
)

// probes returns a test for each feature that only some kernels have. The keys are the rows of the table in docs/INSTALL.md.
func probes() map[string]func(testing.TB) bool {
	return map[string]func(testing.TB) bool{
		"a limit of the MACs that a bridge learns":         limitsLearnedMACs,
		"renaming an interface that is up":                 renamesUp,
		"IPv6 forwarding for single interfaces":            exists("/proc/sys/net/ipv6/conf/lo/force_forwarding"),
		"the features of `podlace doctor kernel-features`": findsNothing,
		"VLANs on bridges":                                 func(t testing.TB) bool { return accepts(t, "vlan", 100) },
	}
}

// TestFeatures compares the table in docs/INSTALL.md with the running kernel, and logs what it lacks.
func TestFeatures(t *testing.T) {
	text, err := os.ReadFile("../../docs/INSTALL.md")
	if err != nil {
		t.Fatal(err)
	}
	heading, rows := featureTable(t, string(text))
	column := columnOf(t, heading)
	if column < 0 {
		t.Fatalf("the table of docs/INSTALL.md has no column for Linux %s: %q", kernelRelease(t), heading)
	}
	all := probes()
	for _, row := range rows {
		probe, ok := all[row[0]]
		if !ok {
			t.Errorf("no test knows the row %q of docs/INSTALL.md", row[0])
			continue
		}
		delete(all, row[0])
		has := probe(t)
		if want := row[column] == "yes"; has != want {
			t.Errorf("%s: %v, docs/INSTALL.md says %q for Linux %s", row[0], has, row[column], heading[column])
		}
		if !has {
			t.Logf("lacks: %s", row[0])
		}
	}
	for name := range all {
		t.Errorf("docs/INSTALL.md has no row %q", name)
	}
}

func featureTable(t *testing.T, text string) (heading []string, rows [][]string) {
	t.Helper()
	for line := range strings.Lines(text) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case cells[0] == "Feature of the kernel":
			heading = cells
		case heading == nil || strings.HasPrefix(cells[0], "---"):
		case len(cells) != len(heading):
			return heading, rows
		default:
			rows = append(rows, cells)
		}
	}
	if rows == nil {
		t.Fatal("docs/INSTALL.md has no table with the column \"Feature of the kernel\"")
	}
	return heading, rows
}

// columnOf returns the column of the running kernel, which is the last one for a newer kernel.
func columnOf(t testing.TB, heading []string) int {
	t.Helper()
	release := kernelRelease(t)
	column := slices.IndexFunc(heading, func(name string) bool { return strings.HasPrefix(release, name+".") })
	if column < 0 && os.Getenv(kernelEnv) == "newest" {
		column = len(heading) - 2 // the last column says what Podlace does
	}
	return column
}

func exists(path string) func(testing.TB) bool {
	return func(testing.TB) bool {
		_, err := os.Stat(path)
		return err == nil
	}
}

// findsNothing reports whether `podlace doctor kernel-features` finds all features.
func findsNothing(t testing.TB) bool {
	t.Helper()
	out, err := exec.Command(filepath.Join(harness.BinDir(), "podlace"), "doctor", "kernel-features", "-o", "json").Output()
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	var findings []struct{ Level, What, Evidence string }
	if err := json.Unmarshal(out, &findings); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	found := false
	for _, f := range findings {
		t.Logf("%s: %s: %s", f.Level, f.What, f.Evidence)
		found = found || f.Level != "ok"
	}
	return !found && len(findings) > 0
}

// accepts reports whether ADD of bridge accepts a key. If the kernel lacks the feature, ADD must fail with code 105.
func accepts(t testing.TB, key string, value any) bool {
	t.Helper()
	pod := harness.NewPod(t, "accepts")
	add := harness.NewCall("ADD", "bridge", pod, pod.Name, harness.BridgeConf().With(key, value))
	o := add.Run(t)
	defer func() { add.With("CNI_COMMAND", "DEL").Run(t).OK(t) }()
	if o.Exit == 0 {
		return true
	}
	o.Refused(t, 105)
	return false
}

// renamesUp reports whether the kernel renames an interface that is up.
func renamesUp(t testing.TB) bool {
	t.Helper()
	dummy := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "up0"}}
	if err := errors.Join(netlink.LinkAdd(dummy), netlink.LinkSetUp(dummy)); err != nil {
		t.Fatal(err)
	}
	defer netlink.LinkDel(dummy)
	err := netlink.LinkSetName(dummy, "up1")
	if err != nil && !errors.Is(err, unix.EBUSY) {
		t.Fatal(err)
	}
	return err == nil
}

// limitsLearnedMACs reports whether Podlace's bridge has a limit of learned MACs.
func limitsLearnedMACs(t testing.TB) bool {
	t.Helper()
	var limited bool
	err := kernel.InScratch(func(n *kernel.Node) error {
		if err := n.AddBridge("macs0", []byte{2, 0, 0, 0, 0, 1}, 0, false, false); err != nil {
			return err
		}
		req := nl.NewNetlinkRequest(unix.RTM_GETLINK, 0)
		req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated("macs0")))
		replies, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
		if err != nil || len(replies) != 1 {
			return errors.Join(err, errors.New("no bridge"))
		}
		value := replies[0][unix.SizeofIfInfomsg:]
		for _, kind := range []uint16{unix.IFLA_LINKINFO, nl.IFLA_INFO_DATA, 49} { // IFLA_BR_FDB_MAX_LEARNED
			attributes, err := nl.ParseRouteAttr(value)
			if err != nil {
				return err
			}
			at := slices.IndexFunc(attributes, func(a syscall.NetlinkRouteAttr) bool { return a.Attr.Type&nl.NLA_TYPE_MASK == kind })
			if at < 0 {
				return nil
			}
			value = attributes[at].Value
		}
		limited = binary.NativeEndian.Uint32(value) == kernel.MaxLearned
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return limited
}

func kernelRelease(t testing.TB) string {
	t.Helper()
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(release))
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/poddevices"
)

// labFlags returns the flags for a fake machine with two NUMA nodes, each with a PF and two VFs, of which pods use two.
func labFlags(t *testing.T, assignable ...poddevices.Node) (flags []string) {
	sysfs := pcitest.Generate(t, pcitest.Machine{Nodes: 2, PFs: 1, VFs: 2})
	dir, err := os.MkdirTemp("", "ls")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	config := filepath.Join(dir, "config.json")
	if err := os.WriteFile(config, []byte(`{"resourceList": [
  {"resourceName": "fast", "selectors": [{"pfNames": ["ens0f0"]}, {"pfNames": ["ens1f0#0"], "drivers": ["iavf"]}]},
  {"resourceName": "none", "selectors": {"pfNames": ["ens9f0"]}}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	held := []poddevices.Device{{Namespace: "shop", Pod: "web-0", Container: "app", Resource: "example.com/fast", ID: "0000:11:02.0",
		CPUs: []int64{3, 4}},
		{Namespace: "shop", Pod: "web-1\x1b[31m", Container: "app", Resource: "example.com/fast", ID: "0000:15:02.0", CPUs: []int64{15, 16}}}
	faults := map[string]string{"0000:11:02.1": "the link of ens0f0 is down"}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		poddevices.Serve(ctx, l, func(_ context.Context, q poddevices.Question) poddevices.Answer {
			if q.Node && len(assignable) == 0 {
				return poddevices.Answer{Error: "the kubelet is away"}
			}
			if q.Node {
				return poddevices.Answer{Node: assignable[0]}
			}
			return poddevices.Answer{Devices: held, Faults: faults}
		}, slog.New(slog.DiscardHandler))
	}()
	t.Cleanup(func() { cancel(); <-done })
	return []string{"--config-file", config, "--resource-prefix", "example.com", "--sysfs", sysfs, "--socket", socket}
}

func runSRIOV(t *testing.T, flags []string, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	return run(append(append([]string{"sriov"}, args...), flags...)...)
}

func TestSRIOVLs(t *testing.T) {
	flags := labFlags(t)
	status, stdout, stderr := runSRIOV(t, flags, "ls")
	const want = `DEVICE        PF      VF      NUMA  DRIVER  RESOURCE          POD              CPUS   FAULT
0000:11:00.0  ens0f0  2 of 2  0     ice     -                 -                -      -
0000:11:02.0  ens0f0  0       0     iavf    example.com/fast  shop/web-0       same   -
0000:11:02.1  ens0f0  1       0     iavf    example.com/fast  -                -      the link of ens0f0 is down
0000:15:00.0  ens1f0  2 of 2  1     ice     -                 -                -      -
0000:15:02.0  ens1f0  0       1     iavf    example.com/fast  shop/web-1?[31m  mixed  -
0000:15:02.1  ens1f0  1       1     iavf    -                 -                -      -
`
	if diff := cmp.Diff(strings.Fields(want), strings.Fields(stdout)); diff != "" || status != 0 || stderr != "" {
		t.Errorf("status %d, %s\n%s\n%s", status, stderr, diff, stdout)
	}
	status, stdout, _ = runSRIOV(t, flags, "ls", "-o", "json")
	var list []map[string]any
	if err := json.Unmarshal([]byte(stdout), &list); err != nil || len(list) != 6 || list[1]["cpus"] != "same" ||
		list[1]["resource"] != "example.com/fast" || list[1]["vfIndex"] != 0.0 {
		t.Errorf("status %d, %v, %s", status, err, stdout)
	}
	// Without a device plugin, the hardware is still listed.
	status, stdout, stderr = runSRIOV(t, append(flags, "--socket", "/nonexistent"), "ls")
	if status != 0 || !strings.Contains(stderr, "the device plugin did not say which pods have devices") ||
		!strings.Contains(stdout, "0000:11:02.1") {
		t.Errorf("status %d, %s%s", status, stdout, stderr)
	}
	for flag, says := range map[string]string{"--config-file": "/nonexistent: no such file",
		"--sysfs": "--sysfs: stat /nonexistent: no such file or directory: want the folder where sysfs is mounted, such as /sys"} {
		status, stdout, stderr = runSRIOV(t, append(flags, flag, "/nonexistent"), "ls")
		if status != exitFailed || stdout != "" || !strings.Contains(stderr, says) {
			t.Errorf("%s: status %d, %s%s", flag, status, stdout, stderr)
		}
	}
	status, _, stderr = runSRIOV(t, append(flags, "--node-name", "x y"), "explain")
	if status != exitFailed || !strings.Contains(stderr, `--node-name "x y": want the name of a Node object`) {
		t.Errorf("status %d, %s", status, stderr)
	}
}

// TestSRIOVWithoutDriver: a VF without a driver is not listed as free to be allocated, whether or not the device plugin answers.
func TestSRIOVWithoutDriver(t *testing.T) {
	flags := labFlags(t)
	if err := os.Remove(filepath.Join(pcitest.Folder(t, flags[5], "0000:15:02.0"), "driver")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(flags[1], []byte(`{"resourceList": [{"resourceName": "fast", "selectors": {"pfNames": ["ens1f0"]}}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, socket := range []string{flags[7], "/nonexistent"} {
		_, stdout, _ := runSRIOV(t, append(flags, "--socket", socket), "explain")
		if want := "offered: meets resourceList[0].selectors; it cannot be allocated at present: no driver is bound"; strings.Count(stdout, want) != 1 {
			t.Errorf("%s: %s", socket, stdout)
		}
	}
}

// TestSRIOVOwnDriver: a VF whose driver a pod's conflist has changed stays in its resource.
func TestSRIOVOwnDriver(t *testing.T) {
	flags := labFlags(t)
	if err := os.WriteFile(flags[1], []byte(`{"resourceList": [{"resourceName": "fast", "selectors": {"drivers": ["ice"]}}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, stdout, _ := runSRIOV(t, flags, "explain"); strings.Count(stdout, "example.com/fast  offered: ") != 2 {
		t.Errorf("got\n%s", stdout)
	}
}

func TestSRIOVExplain(t *testing.T) {
	flags := labFlags(t)
	status, stdout, stderr := runSRIOV(t, flags, "explain")
	if status != 0 || strings.Count(stdout, "\n") != 6 || !strings.Contains(stderr, "ens9f0") ||
		!strings.Contains(stdout, "; it cannot be allocated at present: the link of ens0f0 is down") {
		t.Errorf("status %d, %s%s", status, stdout, stderr)
	}
	status, stdout, _ = runSRIOV(t, flags, "explain", "0000:15:02.1")
	for _, part := range []string{"not offered: no resource matches", "example.com/fast (line 2)", "NO", "pfNames", "ens1f0#0", "found"} {
		if !strings.Contains(stdout, part) {
			t.Errorf("status %d, %q is missing in\n%s", status, part, stdout)
		}
	}
	if _, stdout, _ = runSRIOV(t, flags, "explain", "ens0f0v0"); !strings.Contains(stdout,
		"pod shop/web-0 has it, container app, as example.com/fast") {
		t.Errorf("got\n%s", stdout)
	}
	if _, stdout, _ = runSRIOV(t, flags, "explain", "ens1f0"); strings.Count(stdout, "\n0000:") != 2 {
		t.Errorf("a PF stands for itself and its VFs, got\n%s", stdout)
	}
	for _, args := range [][]string{{"explain", "example.com/fast", "--count", "0"}, {"explain", "--count", "-1"}} {
		if status, _, stderr = runSRIOV(t, flags, args...); status != exitFailed || !strings.Contains(stderr, "want at least 1") {
			t.Errorf("%q: status %d, %s", args, status, stderr)
		}
	}
	if status, _, stderr = runSRIOV(t, flags, "explain", "eth7"); status != exitFailed ||
		!strings.Contains(stderr, "eth7 is no device, interface or resource of this node") {
		t.Errorf("status %d, %s", status, stderr)
	}
}

// TestSRIOVPossible: the output says why the kubelet refused a pod, or would.
func TestSRIOVPossible(t *testing.T) {
	flags := labFlags(t)
	status, stdout, stderr := runSRIOV(t, flags, "explain", "example.com/fast", "--count", "1")
	const want = `RESOURCE          COUNT  FREE AT NODE 0    FREE AT NODE 1  HINTS
example.com/fast  1      0 of 2, 1 faulty  0 of 1          impossible

POLICY            MERGED  ADMITTED
none              -       no, not at present: 0 of 1 example.com/fast are free
best-effort       {0,1}   no, not at present: 0 of 1 example.com/fast are free
restricted        {0,1}   no, not at present: 0 of 1 example.com/fast are free
single-numa-node  -       no, not at present: 0 of 1 example.com/fast are free
`
	if diff := cmp.Diff(want, stdout); diff != "" || status != exitDiffers {
		t.Errorf("status %d, %s\n%s", status, stderr, diff)
	}
	if _, stdout, _ := runSRIOV(t, flags, "explain", "0000:11:02.1"); !strings.Contains(stdout,
		"it cannot be allocated at present: the link of ens0f0 is down") {
		t.Errorf("got\n%s", stdout)
	}
	if status, _, stderr := runSRIOV(t, flags, "explain", "fast", "--count", "1"); status != exitFailed ||
		!strings.Contains(stderr, "one of example.com/fast, example.com/none") {
		t.Errorf("status %d, %s", status, stderr)
	}
	if status, _, stderr := runSRIOV(t, append(flags, "--socket", "/nonexistent"), "explain", "example.com/fast", "--count",
		"1"); status != exitFailed || !strings.Contains(stderr, "the device plugin did not say which devices are free") {
		t.Errorf("status %d, %s", status, stderr)
	}
}

// TestSRIOVMoved: a pod keeps its devices after a change of the configuration. Without a configuration file, the hardware is still listed.
func TestSRIOVMoved(t *testing.T) {
	flags := labFlags(t)
	if err := os.WriteFile(flags[1], []byte(`{"resourceList": [{"resourceName": "new", "selectors": {"pfNames": ["ens0f0", "ens1f0"]}}]}`),
		0o600); err != nil {
		t.Fatal(err)
	}
	if _, stdout, _ := runSRIOV(t, flags, "explain", "0000:11:02.0"); !strings.Contains(stdout,
		"not offered: pod shop/web-0 has it, as example.com/fast") {
		t.Errorf("got\n%s", stdout)
	}
	status, stdout, _ := runSRIOV(t, flags, "explain", "example.com/new", "--count", "1", "-o", "json")
	var got struct {
		Resources []struct{ Nodes map[int]tally }
		Policies  []struct{ Admitted bool }
	}
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || status != 0 || len(got.Policies) != 4 || !got.Policies[3].Admitted ||
		got.Resources[0].Nodes[0] != (tally{All: 1, Faulty: 1}) || got.Resources[0].Nodes[1] != (tally{All: 1, Free: 1}) {
		t.Errorf("status %d, %v\n%s", status, err, stdout)
	}
	pcitest.Remove(t, flags[5], "0000:11:02.0")
	if status, _, stderr := runSRIOV(t, flags, "explain", "0000:11:02.0"); status != exitFailed ||
		!strings.Contains(stderr, "0000:11:02.0 is gone; pod shop/web-0 had it, as example.com/fast") {
		t.Errorf("status %d, %s", status, stderr)
	}
	if err := os.WriteFile(flags[1], []byte(`{`), 0o600); err != nil {
		t.Fatal(err)
	}
	status, stdout, stderr := runSRIOV(t, flags, "ls")
	if status != 0 || !strings.Contains(stderr, "read the configuration") || !strings.Contains(stdout, "0000:15:02.1") ||
		!strings.Contains(stdout, "example.com/fast") {
		t.Errorf("status %d, %s\n%s", status, stderr, stdout)
	}
	if status, _, stderr := runSRIOV(t, flags, "explain"); status != exitFailed || !strings.Contains(stderr, "read the configuration") {
		t.Errorf("status %d, %s", status, stderr)
	}
}

// TestSRIOVUnserved: an unsupported resource is reported with the devices that it blocks, and is an error with --strict.
func TestSRIOVUnserved(t *testing.T) {
	flags := labFlags(t)
	if err := os.WriteFile(flags[1], []byte(`{"resourceList": [{"resourceName": "fpga", "deviceType": "accelerator"},
  {"resourceName": "vdpa", "selectors": {"pfNames": ["ens1f0"], "vdpaType": "vhost"}},
  {"resourceName": "fast", "selectors": {"drivers": ["iavf"]}}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	status, stdout, stderr := runSRIOV(t, flags, "explain", "example.com/vdpa")
	if status != 0 || !strings.Contains(stdout,
		"0000:15:02.1: not offered: example.com/vdpa in line 2 matches it but is not served: unsupported: vdpaType") ||
		!strings.Contains(stderr, "config.json:1:44: resourceList[0].deviceType: unsupported: accelerator; want netDevice: resource example.com/fpga is not served") {
		t.Errorf("status %d, %s\n%s", status, stderr, stdout)
	}
	if status, _, stderr := runSRIOV(t, flags, "explain", "example.com/fpga"); status != exitFailed ||
		!strings.Contains(stderr, "example.com/fpga is not served") {
		t.Errorf("status %d, %s", status, stderr)
	}
	if status, stdout, stderr := runSRIOV(t, flags, "explain", "--strict"); status != exitFailed || stdout != "" ||
		!strings.Contains(stderr, "unsupported: accelerator") {
		t.Errorf("status %d, %s\n%s", status, stderr, stdout)
	}
}

// TestSRIOVExplainRefused: a VF that another plugin must attach is offered and says so, with the remedy once.
func TestSRIOVExplainRefused(t *testing.T) {
	flags := append(labFlags(t), "--sysfs", pcitest.Extract(t, "switchdev"))
	if err := os.WriteFile(flags[1], []byte(`{"resourceList": [{"resourceName": "fast", "selectors": {"pfNames": ["ens2f0np0"]}}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	status, stdout, stderr := runSRIOV(t, flags, "explain")
	const refused = "  example.com/fast  offered: meets resourceList[0].selectors; the plugin sriov refuses it: PF 0000:18:00.0 is in switchdev mode"
	if status != 0 || strings.Count(stdout, refused) != 2 || strings.Count(stderr, "devlink dev eswitch set pci/0000:18:00.0 mode legacy") != 1 {
		t.Errorf("status %d, %s\n%s", status, stderr, stdout)
	}
}

// TestSRIOVReset: a VF that the kubelet has allocated, or may have, is not reset.
func TestSRIOVReset(t *testing.T) {
	if !sandboxed(t) { // the lock of a VF is below /run
		return
	}
	flags := labFlags(t)[4:]
	driver := filepath.Join(pcitest.Folder(t, flags[1], "0000:15:02.1"), "driver")
	if err := errors.Join(os.Remove(driver), os.Symlink("../../../../bus/pci/drivers/vfio-pci", driver)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		says string
		args []string
	}{
		{"VF 0000:11:02.0 is in use: example.com/fast is allocated to pod shop/web-0", []string{"0000:11:02.0", "--yes"}},
		{"allocated to pod shop/web-1?[31m\n", []string{"0000:15:02.0"}},
		{"PCI function 0000:11:00.0 is not a VF of this node (pods do not get a PF", []string{"0000:11:00.0", "--yes"}},
		{"PCI function 0000:77:00.0: is not there", []string{"0000:77:00.0"}},
		{"VF 0000:11:02.1: its interface is in another namespace", []string{"0000:11:02.1", "--yes"}},
		{"VF 0000:15:02.1 has the user space driver vfio-pci, and the device plugin did not say whether a pod has it: ask the SR-IOV",
			[]string{"0000:15:02.1", "--socket", "/none"}},
		{`"ens0f0v0": `, []string{"ens0f0v0"}},
	} {
		args := append(append([]string{"sriov", "reset"}, flags...), c.args...)
		if status, stdout, stderr := run(args...); status == 0 || stdout != "" || !strings.Contains(stderr, c.says) {
			t.Errorf("%s: status %d, %s\n%s", c.args, status, stderr, stdout)
		}
	}
	a := []string{flags[1], "0000:11:02.1"}
	if status, _, stderr := run(append([]string{"sriov", "reset-function"}, a...)...); status == 0 ||
		!strings.Contains(stderr, "it has the driver iavf: unbind it first") {
		t.Errorf("status %d, %s", status, stderr)
	}
}

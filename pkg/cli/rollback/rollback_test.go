// SPDX-License-Identifier: Apache-2.0

package rollback

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/portmap"
	"github.com/podlace/podlace/pkg/store"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

// writeRecord writes a plugin's record and returns its path.
func writeRecord(t *testing.T, name, network, id, netns string, pod plugin.Pod, state any) string {
	t.Helper()
	att, err := attachment.Open(&plugin.Request{Plugin: name, Network: network, ContainerID: id, IfName: "eth0", NetnsPath: netns, Pod: pod,
		Log: slog.Default()})
	if err != nil {
		t.Fatal(err)
	}
	defer att.Close()
	t.Cleanup(func() { os.RemoveAll(filepath.Join(store.Root, network)) })
	if err := att.Save(state); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(store.Root, network, name+"-"+att.Hash())
}

func dryRun(o Options) (string, error) {
	var out bytes.Buffer
	o.Out = &out
	err := Run(o)
	return out.String(), err
}

// TestReadsEachRecordOnce: the time for one pod does not grow with the number of pods in its network.
func TestReadsEachRecordOnce(t *testing.T) {
	const pods = 20
	for i := range pods {
		writeRecord(t, "portmap", "many", fmt.Sprint("pod", i), "/run/netns/none", plugin.Pod{}, map[string]any{})
	}
	fd, err := syscall.InotifyInit1(syscall.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	if _, err := syscall.InotifyAddWatch(fd, filepath.Join(store.Root, "many"), syscall.IN_OPEN); err != nil {
		t.Fatal(err)
	}
	out, err := dryRun(Options{})
	if err != nil || strings.Count(out, "its pod has ended") != pods {
		t.Errorf("%v\n%s", err, out)
	}
	events := make([]byte, 1<<20)
	n, err := syscall.Read(fd, events)
	if err != nil {
		t.Fatal(err)
	}
	if opened := bytes.Count(events[:n], []byte("portmap-")); opened < pods || opened > 2*pods {
		t.Errorf("records were opened %d times for %d pods, want twice each at most", opened, pods)
	}
}

// TestTold: the output says what to do about an unreadable record, a missing configuration, and a pod with a hostile name.
func TestTold(t *testing.T) {
	pod := kerneltest.NewPod(t)
	ports := func(id string) map[string]any { return map[string]any{"ports": "damaged " + id} }
	state := writeRecord(t, "portmap", "n", "state", pod.Path, plugin.Pod{Namespace: "shop", Name: "\x1b[2Jweb\n0" + strings.Repeat("x", 200)},
		ports("state"))
	torn := writeRecord(t, "portmap", "n", "torn", pod.Path, plugin.Pod{}, nil)
	more := writeRecord(t, "bandwidth", "n", "torn", pod.Path, plugin.Pod{}, nil) // of the same attachment
	if err := errors.Join(os.WriteFile(torn, []byte("{"), 0o600), os.WriteFile(more, []byte("{"), 0o600)); err != nil {
		t.Fatal(err)
	}
	out, err := dryRun(Options{})
	if !errors.Is(err, ErrRemains) || !strings.Contains(err.Error(), "attachments that cannot be rewritten: 2;") ||
		strings.Contains(out, "nothing to rewrite") || strings.Count(out, "the runtime delete its pod") != 3 {
		t.Errorf("%v\n%s", err, out)
	}
	for _, says := range []string{"pod shop/?[2Jweb?0xxx", "  FAILED: record " + state + ": ",
		"network n: record " + torn + " cannot be read"} {
		if !strings.Contains(out, says) {
			t.Errorf("%q is not in\n%s", says, out)
		}
	}
	if strings.Contains(out, strings.Repeat("x", 129)) || regexp.MustCompile(`[^\n -~]`).MatchString(out) {
		t.Errorf("the name is raw or long: %q", out)
	}
	out, err = dryRun(Options{ConfDir: "/conf", Damaged: []string{"/conf/10-x.conf: want a regular file"}})
	if out != "" || err == nil || errors.Is(err, ErrRemains) || !strings.Contains(err.Error(),
		"network n has no configuration in /conf that can be read: /conf/10-x.conf: want a regular file") {
		t.Errorf("with a damaged configuration: %v\n%s", err, out)
	}
	if err := errors.Join(os.Remove(state), os.Remove(torn), os.Remove(more)); err != nil {
		t.Fatal(err)
	}
	if out, err = dryRun(Options{ConfDir: "/conf", Damaged: []string{"/conf/10-x.conf: want a regular file"}}); err != nil {
		t.Errorf("with a damaged configuration, and no pod: %v\n%s", err, out)
	}
}

// TestNoConfiguration: the output has the configurations' folder and the flag that selects another.
func TestNoConfiguration(t *testing.T) {
	key := attachment.Key{Network: "none", ContainerID: "c", IfName: "eth0"}
	link := key.HostVeth()
	if out, err := exec.Command("ip", "link", "add", link, "type", "veth", "peer", "name", "peer0").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", link).Run() })
	writeRecord(t, "bridge", "none", "c", "/proc/self/ns/net", plugin.Pod{},
		map[string]any{"masquerade": "nftables", "addresses": []string{"10.1.2.3/24"}})
	out, err := dryRun(Options{ConfDir: "/conf"})
	if err == nil || !strings.HasPrefix(out, "container c, eth0 in network none\n") || !strings.Contains(out,
		"names the plugin bridge: the configurations of /conf were read, --conf-dir names another folder") ||
		strings.Contains(out, "nothing to rewrite") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestVFs: a pod with VFs is not converted, and a VF's saved settings stay until they are restored.
func TestVFs(t *testing.T) {
	pod := kerneltest.NewPod(t)
	file := writeRecord(t, "sriov", "n", "c", pod.Path, plugin.Pod{Namespace: "shop", Name: "web-0"}, map[string]any{})
	journals := filepath.Join(store.Root, attachment.Journals)
	t.Cleanup(func() { os.RemoveAll(journals) })
	if err := errors.Join(os.Mkdir(journals, 0o700), os.WriteFile(filepath.Join(journals, ".lock"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	out, err := dryRun(Options{Act: true})
	if err == nil || !strings.Contains(out, "  FAILED: it has VFs, which the reference does not bring back: have the runtime delete the pod") {
		t.Errorf("%v\n%s", err, out)
	}
	journal := filepath.Join(journals, "0000:11:02.1")
	if err := errors.Join(os.Remove(file), os.WriteFile(journal, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if out, err = dryRun(Options{Act: true}); !errors.Is(err, ErrRemains) ||
		!strings.Contains(err.Error(), "VFs 0000:11:02.1 are not as they were") {
		t.Errorf("%v\n%s", err, out)
	}
	if err := attachment.Clear(); err != nil {
		t.Error(err)
	}
	if err := os.Remove(journal); err != nil {
		t.Error(err)
	}
	if out, err = dryRun(Options{Act: true}); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if found, err := os.ReadDir(store.Root); len(found) > 0 {
		t.Errorf("left: %v, %v", found, err)
	}
}

// TestAtOnce: rollbacks at the same time write each rule once, because each pod is rewritten under its attachment's lock.
func TestAtOnce(t *testing.T) {
	const pods = 8
	conf := t.TempDir()
	const list = `{"cniVersion":"1.0.0","name":"once","plugins":[{"type":"bridge","macspoofchk":true}]}`
	if err := os.WriteFile(filepath.Join(conf, "1.conflist"), []byte(list), 0o600); err != nil {
		t.Fatal(err)
	}
	networks, notes, err := reconcile.Networks(conf)
	if err != nil || len(networks) != 1 {
		t.Fatal(networks, notes, err)
	}
	kerneltest.EmptyNFT(t)
	for i := range pods {
		link := attachment.Key{Network: "once", ContainerID: fmt.Sprint("pod", i), IfName: "eth0"}.HostVeth()
		add := exec.Command("ip", "link", "add", link, "type", "veth", "peer", "name", fmt.Sprint("peer", i))
		if out, err := add.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		t.Cleanup(func() { _ = exec.Command("ip", "link", "del", link).Run() })
		writeRecord(t, "bridge", "once", fmt.Sprint("pod", i), "/proc/self/ns/net", plugin.Pod{},
			map[string]any{"guard": map[string]any{"link": link, "mac": "02:00:00:00:00:01"}})
	}
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() { _, _ = dryRun(Options{Act: true, Networks: networks}) }) // a late one finds no records
	}
	group.Wait()
	out, err := exec.Command("nft", "list", "ruleset").Output()
	for i := range pods {
		if n := strings.Count(string(out), fmt.Sprintf("macspoofchk-pod%d-eth0", i)); n != 4 || err != nil {
			t.Errorf("pod%d has %d rules, want 4: %v", i, n, err)
		}
	}
}

// TestTables (F-44): each of Podlace's nftables tables is deleted, so nft.Tables must list all of them.
func TestTables(t *testing.T) {
	host, err := kernel.Host()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	if err := errors.Join(portmap.ProtectLoopback(host), portmap.HostportSchema().Install(nil),
		bridge.SetMasquerade(bridge.MasqueradeSets{Network: "n"}),
		bridge.EnsureVLANGateway(host, bridge.VLANGateway{Bridge: "br0", Link: "br0.5", MAC: mac}),
		bridge.SetGuards([]bridge.Guard{{Link: "veth0", MAC: mac.String()}})); err != nil {
		t.Fatal(err)
	}
	var registered []string
	for _, table := range nft.Tables() {
		registered = append(registered, "table "+table.String())
	}
	slices.Sort(registered)
	if made := ownTables(t); !slices.Equal(made, registered) {
		t.Errorf("the kernel has %q, the registry %q", made, registered)
	}
	if out, err := exec.Command("ip", "link", "add", "rb0", "type", "bridge").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", "rb0").Run() })
	if err := portmap.OpenLoopback(host, "0123456789abcdef", "rb0"); err != nil {
		t.Fatal(err)
	}
	if out, err := dryRun(Options{Act: true}); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if on, err := host.Get("ipv4/conf/rb0/route_localnet"); err != nil || on != "0" {
		t.Errorf("route_localnet is %s without its protection, %v", on, err)
	}
	if left := ownTables(t); len(left) > 0 {
		t.Errorf("rollback left %q", left)
	}
}

// ownTables returns the kernel's nftables tables with Podlace's prefix.
func ownTables(t *testing.T) (list []string) {
	t.Helper()
	out, err := exec.Command("nft", "list", "tables").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		if strings.Contains(line, "podlace") {
			list = append(list, line)
		}
	}
	slices.Sort(list)
	return list
}

// TestOwnValues: the output names each value that the reference plugins refuse.
func TestOwnValues(t *testing.T) {
	writeRecord(t, "portmap", "n", "own", "/run/netns/none", plugin.Pod{}, map[string]any{})
	for text, want := range map[string][]string{
		`{"ipMasq": true, "mtu": 1400, "subnet": "10.1.0.0/16"}`:       nil,
		"{\"ipMasq\": {\n  \"v6\": false\n}, \"mtu\" :\"auto\"}":       {`"ipMasq": { "v6": false }`, `"mtu" :"auto"`},
		`[[{"subnet": "usePodCidr"}], [{"subnet": "usePodCidrIPv6"}]]`: {`"subnet": "usePodCidr"`, `"subnet": "usePodCidrIPv6"`},
	} {
		out, err := dryRun(Options{Networks: []reconcile.Network{{Name: "n", File: "/conf/x", Text: []byte(text)}}})
		if err != nil || strings.Count(out, "NOTE: the reference refuses ") != len(want) {
			t.Errorf("%s: %v\n%s", text, err, out)
		}
		for _, value := range want {
			if !strings.Contains(out, "network n: NOTE: the reference refuses "+value+": replace it in /conf/x\n") {
				t.Errorf("%q is not in\n%s", value, out)
			}
		}
	}
}

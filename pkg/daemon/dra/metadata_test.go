// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1alpha1"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
	cdi "tags.cncf.io/container-device-interface/specs-go"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/sriov"
)

// startContainer mounts the metadata files of a claim as a runtime does for a container, until the test ends, and returns their paths.
func (l *draLab) startContainer(c *resourceapi.ResourceClaim) (paths []string) {
	l.Helper()
	specs, err := filepath.Glob(filepath.Join(l.options.CDI, claim.Driver+"_metadata_"+string(c.UID)+"_*.json"))
	must(l, err)
	for _, path := range specs {
		data, err := os.ReadFile(path)
		must(l, err)
		var spec cdi.Spec
		must(l, json.Unmarshal(data, &spec))
		m := spec.Devices[0].ContainerEdits.Mounts[0]
		must(l, os.MkdirAll(filepath.Dir(m.ContainerPath), 0o755), os.WriteFile(m.ContainerPath, nil, 0o600),
			unix.Mount(m.HostPath, m.ContainerPath, "", unix.MS_BIND, ""))
		l.Cleanup(func() { must(l, unix.Unmount(m.ContainerPath, unix.MNT_DETACH), os.Remove(m.ContainerPath)) })
		paths = append(paths, m.ContainerPath)
	}
	return paths
}

// metadataText returns what a container reads about a request with the reader of Kubernetes, which is also that of KubeVirt 1.9: for each
// device its PCI address, resource, NUMA node and network data.
func metadataText(read func(claim, request string) (*metadata.DeviceMetadata, error), name, request string) string {
	m, err := read(name, request)
	if err != nil {
		return err.Error()
	}
	var list []string
	for _, d := range m.Requests[0].Devices {
		text := fmt.Sprintf("%s: %s %s %s numa %d", m.Requests[0].Name, d.Name, *d.Attributes["resource.kubernetes.io/pciBusID"].StringValue,
			*d.Attributes["resource"].StringValue, *d.Attributes["numa"].IntValue)
		if n := d.NetworkData; n != nil {
			text += fmt.Sprintf(" %s %s %s", n.InterfaceName, n.HardwareAddress, n.IPs)
		}
		list = append(list, text)
	}
	return strings.Join(list, "; ")
}

func (l *draLab) awaitMetadata(name, request, want string) {
	l.Helper()
	var got string
	l.await(fmt.Sprintf("metadata %q", want), func() bool {
		now := metadataText(devicemetadata.ReadResourceClaimTemplateMetadata, name, request)
		if now != got {
			got = now
			fmt.Fprintf(l.log, "metadata is %q\n", got)
		}
		return got == want
	})
}

// restart starts another driver with the state of the first, as after a kill.
func (l *draLab) restart() (stop func(), k *fakeKubelet) {
	l.Helper()
	l.Driver = New(l.options)
	l.repeatInventory()
	stop = l.runDriver()
	l.await("the driver leads", l.Leads)
	return stop, l.register(false)
}

const (
	vf0Text   = "a: 0000-11-02-0 0000:11:02.0 example.com/fast numa 0"
	attached0 = vf0Text + " net1 02:00:00:00:00:01 [10.0.0.7/24 fd00::7/64]"
)

// TestMetadata: a container reads the attributes of its devices from its start on, and after ADD also the interface and addresses, in
// the file that it has mounted. They are there after a restart of the driver at any time and of the kubelet, and go with DEL.
func TestMetadata(t *testing.T) {
	l := newDRALab(t)
	stop := l.runDriver()
	k := l.register(false)
	c := newClaim("c-1", "web", deviceResult("a", vf0), deviceResult("b/large", vf1), deviceResult("b/large", vf2))
	l.addClaims(c)
	const want = "a=node-a/0000-11-02-0 podlace.io/vf=c-1-a,sriov.podlace.io/metadata=c-1_a; " +
		"b=node-a/0000-11-02-1 podlace.io/vf=c-1-b.large,sriov.podlace.io/metadata=c-1_b; b=node-a/0000-11-02-2 "
	if diff := cmp.Diff([]string{want}, k.prepareClaims(c)); diff != "" {
		t.Fatal(diff)
	}
	paths := l.startContainer(c)
	const both = "b/large: 0000-11-02-1 0000:11:02.1 example.com/fast numa 0; b/large: 0000-11-02-2 0000:11:02.2 example.com/fast numa 0"
	l.awaitMetadata("nic", "a", vf0Text)
	l.awaitMetadata("nic", "b", both)
	checkVersions(t, paths...)

	stop() // between Prepare and ADD
	l.writeJournal(c, vf0, "web-0", "/proc/self/ns/net", "10.0.0.7/24", "fd00::7/64")
	stop, _ = l.restart()
	l.awaitMetadata("nic", "a", attached0)
	l.awaitMetadata("nic", "b", both)
	checkVersions(t, paths...)
	l.adding = true
	l.writeJournal(c, vf1, "web-0", "/proc/self/ns/net")
	l.adding = false
	l.writeJournal(c, vf2, "web-0", "/proc/self/ns/net")
	l.awaitMetadata("nic", "b", both+" net1 02:00:00:00:00:01 []")

	before := l.generation("nic", "a")
	stop() // after the update
	stop, k = l.restart()
	l.detach(vf1)
	l.detach(vf2)
	l.awaitMetadata("nic", "b", both)
	if now := l.generation("nic", "a"); now != before {
		t.Errorf("a restart changed generation %d to %d", before, now)
	}
	file, spec := l.metadataFile("web", "a"), filepath.Join(l.options.CDI, claim.Driver+"_metadata_c-1_a.json")
	fileBefore, specBefore := inode(t, file), inode(t, spec)
	k.prepareClaims(c) // a restarted kubelet prepares all claims again
	if inode(t, file) != fileBefore || inode(t, spec) == specBefore {
		t.Error("Prepare replaced the file, or wrote the CDI specification in place")
	}
	l.awaitMetadata("nic", "a", attached0)
	l.detach(vf0)
	l.awaitMetadata("nic", "a", vf0Text)
	if got := k.unprepareClaims("c-1"); got[0] != "" {
		t.Error(got)
	}
	l.noMetadata()
	stop()
}

// metadataFile returns the path of a metadata file on the node.
func (l *draLab) metadataFile(name, request string) string {
	return filepath.Join(l.options.metadataFolder(), "shop_"+name, request, metadataFile)
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	var info unix.Stat_t
	must(t, unix.Stat(path, &info))
	return info.Ino
}

// generation returns the generation of a metadata file that a container has.
func (l *draLab) generation(name, request string) int64 {
	l.Helper()
	m, err := devicemetadata.ReadResourceClaimTemplateMetadataWithDriverName(claim.Driver, name, request)
	must(l, err)
	return m.Generation
}

// noMetadata fails if metadata of any claim is left.
func (l *draLab) noMetadata() {
	l.Helper()
	if got := l.fileNames(l.options.metadataFolder()) + l.fileNames(l.options.CDI); got != "" {
		l.Errorf("left: %s", got)
	}
}

// checkVersions checks that metadata files are valid, and have the same content for readers of v1alpha1 only, such as KubeVirt 1.8.
func checkVersions(t *testing.T, paths ...string) {
	t.Helper()
	for _, path := range paths {
		data, err := os.ReadFile(path)
		must(t, err)
		var invalid error
		var newest, old metadata.DeviceMetadata
		stream := json.NewDecoder(bytes.NewReader(data))
		must(t, devicemetadata.DecodeMetadataFromStream(stream, &newest, devicemetadata.DecodeMetadataWithValidationResult(&invalid)), invalid)
		var raw json.RawMessage
		var version struct{ APIVersion string }
		must(t, stream.Decode(&raw), json.Unmarshal(raw, &version))
		must(t, devicemetadata.DecodeMetadataFromStream(json.NewDecoder(bytes.NewReader(raw)), &old))
		if diff := cmp.Diff(newest, old); diff != "" || version.APIVersion != v1alpha1.SchemeGroupVersion.String() || stream.More() {
			t.Errorf("%s: %s, more %v: %s", path, version.APIVersion, stream.More(), diff)
		}
	}
}

// TestMetadataOfNamedClaim: the file of a claim that no template made is found by the claim's name. A later claim of this name keeps its
// file when a pod of the former one is found, and when the former is unprepared. No container of the former one sees it.
func TestMetadataOfNamedClaim(t *testing.T) {
	l := newDRALab(t)
	l.runDriver()
	k := l.register(false)
	old, next := newClaim("c-1", "web", deviceResult("a", vf1)), newClaim("c-2", "web", deviceResult("a", vf0))
	old.Annotations, next.Annotations = nil, nil
	l.addClaims(old)
	k.prepareClaims(old)
	former, err := os.Open(l.metadataFile("web", "a"))
	must(t, err)
	defer former.Close()
	before, err := io.ReadAll(former)
	must(t, err)
	must(t, l.client.Tracker().Update(resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), next, "shop"))
	k.prepareClaims(next)
	l.startContainer(next)
	l.writeJournal(old, vf1, "old", "/proc/self/ns/net", "10.0.0.9/24")
	l.writeJournal(next, vf0, "web", "/proc/self/ns/net", "10.0.0.7/24", "fd00::7/64")
	read := func() string { return metadataText(devicemetadata.ReadResourceClaimMetadata, "web", "a") }
	l.await(attached0, func() bool { return read() == attached0 })
	file, err := os.ReadFile(l.metadataFile("web", "a"))
	must(t, err)
	l.writeJournal(old, vf1, "old", "/proc/self/ns/net", "10.0.0.10/24")
	time.Sleep(joinStatus)
	if got := read(); got != attached0 {
		t.Error(got)
	}
	now := make([]byte, len(before))
	if _, err := former.ReadAt(now, 0); err != nil || !bytes.Equal(now, before) {
		t.Errorf("a container of the former claim reads %s: %v", now, err)
	}
	l.detach(vf1)
	if got := k.unprepareClaims("c-1"); got[0] != "" {
		t.Error(got)
	}
	if got, err := os.ReadFile(l.metadataFile("web", "a")); err != nil || !bytes.Equal(got, file) {
		t.Errorf("after an update and the end of the former claim: %s, %v", got, err)
	}
	l.detach(vf0)
}

// TestMetadataRestored: a file that a kill has left incomplete is restored in place, wherever it is damaged, and on a file system without
// fallocate(2).
func TestMetadataRestored(t *testing.T) {
	l := newDRALab(t)
	folder := l.options.metadataFolder()
	must(t, os.MkdirAll(folder, 0o755), unix.Mount("ramfs", folder, "ramfs", 0, ""))
	t.Cleanup(func() { must(t, unix.Unmount(folder, unix.MNT_DETACH)) })
	l.runDriver()
	k := l.register(false)
	c := newClaim("c-1", "web", deviceResult("a", vf0))
	l.addClaims(c)
	k.prepareClaims(c)
	l.startContainer(c)
	l.writeJournal(c, vf0, "web-0", "/proc/self/ns/net", "10.0.0.7/24", "fd00::7/64")
	l.awaitMetadata("nic", "a", attached0)
	path := l.metadataFile("web", "a")
	whole, err := os.ReadFile(path)
	must(t, err)
	second := bytes.LastIndex(whole, []byte("\n{"))
	for what, damaged := range map[string][]byte{"empty": nil, "first": whole[:second/2], "second": whole[:second+20],
		"garbage": append(bytes.Repeat([]byte("x"), 100), whole[100:]...), "tail": append(bytes.Clone(whole), "  }\n}"...)} {
		must(t, os.WriteFile(path, damaged, 0o600))
		l.updateMetadata()
		if got := metadataText(devicemetadata.ReadResourceClaimTemplateMetadata, "nic", "a"); got != attached0 {
			t.Errorf("%s: %s", what, got)
		}
		if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, whole) {
			t.Errorf("%s: left %s: %v", what, now, err)
		}
	}
	if strings.Contains(l.log.String(), "metadata of a claim") {
		t.Error(l.log)
	}
	l.detach(vf0)
}

// TestMetadataAtOnce: Prepare, updates and the removal of a former claim may run at the same time.
func TestMetadataAtOnce(t *testing.T) {
	l := preparedLab(t)
	path := l.metadataFile("web", "a")
	data, err := os.ReadFile(path)
	must(t, err)
	r, err := claim.Read(l.options.Claims, "c-1")
	must(t, err)
	held := []sriov.Holding{{Claim: r.Devices[0].Claim, Ready: true, Name: "net1"}}
	var running sync.WaitGroup
	for _, f := range []func() error{
		func() error { return l.writePrepared(path, data, 0o644) },
		func() error { return l.writePrepared(path, data, 0o644) },
		func() error { return l.updateClaimMetadata(r.Claim(), held) },
		func() error { return l.removeMetadata(filepath.Dir(filepath.Dir(path))) }} {
		running.Go(func() {
			for range 1000 {
				if err := f(); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	running.Wait()
	checkVersions(t, path)
}

// TestStaleMetadata: a claim that was prepared after the search began keeps its metadata, as does one without a record that the kubelet
// has. What has gone meanwhile is no error.
func TestStaleMetadata(t *testing.T) {
	l := preparedLab(t)
	must(t, os.Symlink("/none", filepath.Join(l.options.metadataFolder(), "gone")))
	remove := func(notes ...claim.KubeletClaim) string {
		must(t, (&collector{Driver: l.Driver}).removeStaleMetadata(notes, time.Now().Add(orphanedAfter)))
		return l.fileNames(l.options.metadataFolder()) + " " + l.fileNames(l.options.CDI)
	}
	const kept = "gone shop_web sriov.podlace.io-c-1.json sriov.podlace.io_metadata_c-1_a.json"
	if got := remove(); got != kept {
		t.Errorf("with a record: %s", got)
	}
	must(t, claim.Remove(l.options.Claims, "c-1"))
	if got := remove(claim.KubeletClaim{UID: "c-1"}); got != kept {
		t.Errorf("with an entry of the kubelet: %s", got)
	}
	must(t, os.WriteFile(filepath.Join(filepath.Dir(l.metadataFile("web", "a")), savedMetadata), nil, 0o600)) // after a loss of power
	if got := remove(); got != "gone sriov.podlace.io-c-1.json" {
		t.Errorf("left: %s", got)
	}
}

// TestMetadataFolderFails: a pod without metadata starts and ends while the folder is full or read-only, and no file is damaged. Later
// updates arrive, and what could not be removed goes.
func TestMetadataFolderFails(t *testing.T) {
	l := newDRALab(t)
	folder := l.options.metadataFolder()
	must(t, os.MkdirAll(folder, 0o755), unix.Mount("tmpfs", folder, "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { must(t, unix.Unmount(folder, unix.MNT_DETACH)) })
	l.runDriver()
	k := l.register(false)
	c, late := newClaim("c-1", "web", deviceResult("a", vf0)), newClaim("c-2", "late", deviceResult("a", vf1))
	l.addClaims(c, late)
	k.prepareClaims(c)
	l.startContainer(c)
	if err := os.WriteFile(filepath.Join(folder, "other"), make([]byte, 64<<10), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	if got := k.prepareClaims(late); got[0] != "a=node-a/0000-11-02-1 podlace.io/vf=c-2-a" {
		t.Error(got)
	}
	l.await("a log line about Prepare", func() bool { return strings.Contains(l.log.String(), "Failed to write device metadata") })
	var ips []string
	for i := range 200 {
		ips = append(ips, fmt.Sprintf("2001:db8:1111:2222:3333:4444:5555:%x/128", 0x1000+i))
	}
	l.writeJournal(late, vf1, "late-0", "/proc/self/ns/net")
	l.writeJournal(c, vf0, "web-0", "/proc/self/ns/net", ips...)
	l.await("a log line about ADD", func() bool {
		return strings.Contains(l.log.String(), "could not update the device metadata of a claim")
	})
	if got := metadataText(devicemetadata.ReadResourceClaimTemplateMetadata, "nic", "a"); got != vf0Text {
		t.Errorf("on a full disk: %s", got)
	}
	must(t, os.Remove(filepath.Join(folder, "other")))
	l.awaitMetadata("nic", "a", vf0Text+" net1 02:00:00:00:00:01 ["+strings.Join(ips[:maxStatusIPs], " ")+"]")
	if strings.Contains(l.log.String(), "claim=\"claim shop/late\"") {
		t.Errorf("the claim without metadata is logged:\n%s", l.log)
	}
	l.detach(vf0)
	l.awaitMetadata("nic", "a", vf0Text)

	must(t, unix.Mount("", folder, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	if diff := cmp.Diff([]string{"", ""}, k.unprepareClaims("c-1", "c-2")); diff != "" {
		t.Error(diff)
	}
	must(t, unix.Mount("", folder, "", unix.MS_REMOUNT, ""))
	live := newClaim("c-3", "live", deviceResult("a", vf2))
	l.addClaims(live)
	k.prepareClaims(live)
	l.writeKubeletFile()
	collector := &collector{Driver: l.Driver}
	collector.collect(t.Context(), time.Now())
	if got := l.fileNames(folder); got != "shop_late shop_live shop_web" {
		t.Errorf("too early: %s", got)
	}
	collector.collect(t.Context(), time.Now().Add(orphanedAfter))
	if got := l.fileNames(folder) + " " + l.fileNames(l.options.CDI); got != "shop_live sriov.podlace.io-c-3.json sriov.podlace.io_metadata_c-3_a.json" {
		t.Errorf("left: %s", got)
	}
}

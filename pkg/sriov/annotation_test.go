// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
)

// allowAll are the keys of a configuration that lets pods choose all that they can.
var allowAll = []any{"allowAnnotations", allowedChoices}

// withAnnotation returns the runtimeConfig of a runtime that passes pod annotations.
func withAnnotation(text string) object {
	return object{"io.kubernetes.cri.pod-annotations": object{"podlace.io/vfs": text, "other": "}"}}
}

// TestChoices: a pod chooses the MAC, the addresses and the interface name of each of its VFs.
func TestChoices(t *testing.T) {
	kerneltest.Slow(t)
	l := newLab(t, append(allowAll, "ipam", ranges(), "reportIPs", true)...)
	l.allocate(vf0, vf1)
	text := `{"net2": {"mac": "02:00:00:00:00:02", "ips": ["10.61.0.77", "fd00:61::77/64"], "name": "data"}, "net1": {"mac": "02:00:00:00:00:01"}}`
	a := l.add("a", "runtimeConfig", withAnnotation(text))
	var got []string
	for _, i := range a.result.Interfaces[1:] {
		got = append(got, i.Name+" "+i.Mac)
	}
	for _, ip := range a.result.IPs[1:] {
		got = append(got, fmt.Sprint(ip.Address.String(), " on ", a.result.Interfaces[*ip.Interface].Name))
	}
	want := []string{"net1 02:00:00:00:00:01", "data 02:00:00:00:00:02", "10.61.0.2/24 on net1", "fd00:61::2/64 on net1",
		"10.61.0.77/24 on data", "fd00:61::77/64 on data"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if got := l.podLink("data").MAC.String(); got != "02:00:00:00:00:02" {
		t.Errorf("MAC %s", got)
	}
	l.OK(a.check("runtimeConfig", withAnnotation(text)))
	l.del("a")
}

// TestChoicesRefused: ADD refuses forbidden or impossible choices before any change.
func TestChoicesRefused(t *testing.T) {
	l := newLab(t, allowAll...)
	l.allocate(vf0, vf1)
	for _, c := range []struct {
		says, text string
		keys       []any
	}{
		{`annotation podlace.io/vfs: "net1": "trust": pods may only choose ["mac" "ips" "name"] on this node`,
			`{"net1": {"trust": "on"}}`, nil},
		{`"vlan": pods may only choose`, `{"net1": {"vlan": 5}}`, nil},
		{`"spoofchk": pods may only choose`, `{"net1": {"spoofchk": "off"}}`, nil},
		{`"mac": pods may only choose ["name"] on this node`, `{"net1": {"mac": "02:00:00:00:00:01"}}`,
			[]any{"allowAnnotations", []string{"name"}}},
		{`pods may only choose []`, `{"net1": {"name": "x"}}`, []any{"allowAnnotations", []string{}}},
		{`allowAnnotations "trust": want some of mac, ips, name`, `{}`, []any{"allowAnnotations", []string{"mac", "trust"}}},
		{`mac "03:00:00:00:00:01": want a unicast MAC address`, `{"net1": {"mac": "03:00:00:00:00:01"}}`, nil},
		{`name "a/b": character '/' is not allowed`, `{"net1": {"name": "a/b"}}`, nil},
		{`name 5: want a text`, `{"net1": {"name": 5}}`, nil},
		{`ips ["10.1.2.3"]: the configuration has no ipam, so VFs get no addresses`, `{"net1": {"ips": ["10.1.2.3"]}}`, nil},
		{`ips ["10.61.0.256"]: "10.61.0.256": want an address`, `{"net1": {"ips": ["10.61.0.256"]}}`, []any{"ipam", ranges()}},
		{`ips "10.61.0.25": want a list of addresses`, `{"net1": {"ips": "10.61.0.25"}}`, []any{"ipam", ranges()}},
		{`the pod has no VF with the name "net3"`, `{"net3": {"name": "x"}}`, nil},
		{`two interfaces of the pod would be named net1`, `{"net2": {"name": "net1"}}`, nil},
		{`mac 02:00:00:00:00:01: two VFs of the pod would have the same MAC`,
			`{"net1": {"mac": "02:00:00:00:00:01"}, "net2": {"mac": "02:00:00:00:00:01"}}`, nil},
		{`two interfaces of the pod would be named eth0`, `{"net2": {"name": "eth0"}}`, nil},
		{`annotation podlace.io/vfs: want a JSON object of interfaces`, `{"net1"`, nil},
		{`annotation podlace.io/vfs: want a JSON object of interfaces`, `[]`, nil},
	} {
		l.Fails(l.Call("ADD", "a", append(c.keys, "runtimeConfig", withAnnotation(c.text))...), plugin.CodeConfig, c.says)
	}
	l.Fails(l.Call("ADD", "a", "ipam", ranges(), "runtimeConfig", withAnnotation(`{"net1": {"ips": ["192.0.2.1"]}}`)), plugin.CodeConfig,
		"192.0.2.1")
	l.isGolden()
	*l.devices = nil
	l.Fails(l.Call("ADD", "a", "runtimeConfig", withAnnotation(`{"net1": {"name": "x"}}`)), plugin.CodeConfig, `the pod has no VF with the name "net1"`)
	l.allocate(vf0)
	l.Fails(l.Call("ADD", "a", "prevResult", nil, "runtimeConfig", withAnnotation(`{"eth0": {"name": "x"}}`)), plugin.CodeConfig,
		"name x: the runtime requires the name eth0")
	l.isGolden()
}

// TestChoicesByDefault: without allowAnnotations, a pod chooses nothing, and the error names the key.
func TestChoicesByDefault(t *testing.T) {
	l := newLab(t, "ipam", ranges())
	l.allocate(vf0)
	for _, choice := range []string{`"mac": "02:00:00:00:00:01"`, `"ips": ["10.61.0.77"]`, `"name": "data"`} {
		o := l.Call("ADD", "a", "runtimeConfig", withAnnotation(`{"net1": {`+choice+`}}`))
		l.Fails(o, plugin.CodeConfig, "pods may only choose [] on this node")
		if !strings.Contains(o.Failure.Details, "allowAnnotations of the plugin sriov lists what pods may choose, of mac, ips, name") {
			t.Errorf("details: %s", o.Failure.Details)
		}
	}
	l.isGolden()
}

// TestDeviceInfo: a pod that knows its UID finds the VF of each interface. DEL removes all device-info files.
func TestDeviceInfo(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0, vf1)
	args := "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=5d1c"
	files := func() (found []string) {
		paths, err := filepath.Glob(defaultInfoDir + "/*")
		must(t, err)
		for _, path := range paths {
			data, err := os.ReadFile(path)
			must(t, err)
			found = append(found, filepath.Base(path)+" "+string(data))
		}
		return found
	}
	a := l.add("a", "CNI_ARGS", args)
	info := func(vf string) string {
		return `{"type":"pci","version":"1.1.0","pci":{"pci-address":"` + vf + `","pf-pci-address":"0000:11:00.0"}}`
	}
	if diff := cmp.Diff([]string{"5d1c-net1-device.json " + info(vf0), "5d1c-net2-device.json " + info(vf1)}, files()); diff != "" {
		t.Error(diff)
	}
	l.OK(a.check("CNI_ARGS", args))
	l.del("a")
	if left := files(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	l.allocate(vf0)
	wanted := filepath.Join(strings.TrimPrefix(defaultInfoDir, "/var"), "fast_net1")
	l.add("b", "prevResult", nil, "runtimeConfig", object{"CNIDeviceInfoFile": wanted})
	data, err := os.ReadFile(wanted)
	if must(t, err); string(data) != info(vf0) {
		t.Errorf("%s", data)
	}
	l.del("b")
	if _, err := os.Stat(wanted); !os.IsNotExist(err) {
		t.Errorf("%s: %v", wanted, err)
	}
	l.Fails(l.Call("ADD", "a", "deviceInfoDir", "info"), plugin.CodeConfig, "want an absolute path")
	for _, file := range []string{"info", "/run/podlace/.vfs/info.json", defaultInfoDir + "/../x.json"} {
		l.Fails(l.Call("ADD", "a", "runtimeConfig", object{"CNIDeviceInfoFile": file}), plugin.CodeConfig, "want a file in "+defaultInfoDir)
	}
	// A file in place of the folder of device-info files prevents their removal. DEL must restore the VF nevertheless.
	a = l.add("c", "CNI_ARGS", args)
	must(t, os.RemoveAll(defaultInfoDir), os.WriteFile(defaultInfoDir, nil, 0o600))
	if o := l.OK(l.Call("DEL", "c")); !strings.Contains(o.Log, "could not remove the device-info file") {
		t.Errorf("log %s", o.Log)
	}
	l.OK(a.Call("DEL", "c"))
	must(t, os.Remove(defaultInfoDir), syscall.Mkfifo(defaultInfoDir, 0o600))
	l.Fails(l.Call("ADD", "a"), plugin.CodeIO, "device-info file")
	must(t, os.Remove(defaultInfoDir))
	l.Fails(l.Call("ADD", "a", "deviceInfoDir", "/proc/self/info"), plugin.CodeIO, "device-info file")
	l.isGolden()
}

// TestLogFile: log and errors go to the file in the key logFile, as with sriov-cni. DEL succeeds even if it cannot be written.
func TestLogFile(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0)
	path := filepath.Join(t.TempDir(), "sriov.log")
	read := func() string {
		data, err := os.ReadFile(path)
		must(t, err)
		return string(data)
	}
	if o := l.OK(l.Call("ADD", "a", "logFile", path, "logLevel", "debug")); o.Log != "" || !strings.Contains(read(), "msg=change") {
		t.Errorf("stderr %q, file %q", o.Log, read())
	}
	l.Fails(l.Call("ADD", "a", "logFile", path, "logLevel", "error"), plugin.CodeAddressTaken, "already exists")
	if !strings.Contains(read(), "level=ERROR") || !strings.Contains(read(), "pod=shop/web-0") {
		t.Errorf("file %q", read())
	}
	if o := l.OK(l.Call("DEL", "a", "logFile", "/proc/none", "logLevel", "loud")); !strings.Contains(o.Log, "cannot write to logFile") {
		t.Errorf("stderr %q", o.Log)
	}
	fifo := filepath.Join(t.TempDir(), "fifo")
	must(t, syscall.Mkfifo(fifo, 0o600))
	reader, err := os.OpenFile(fifo, os.O_RDWR, 0)
	must(t, err)
	defer reader.Close()
	for _, no := range []string{fifo, "/dev/null"} {
		if o := l.OK(l.Call("DEL", "a", "logFile", no)); !strings.Contains(o.Log, no+" is no regular file") {
			t.Errorf("%s: stderr %q", no, o.Log)
		}
	}
	l.Fails(l.Call("ADD", "a", "logLevel", "loud"), plugin.CodeConfig, `logLevel "loud": want debug`)
	l.Fails(l.Call("ADD", "a", "logFile", "sriov.log"), plugin.CodeConfig, `logFile "sriov.log": want an absolute path`)
	if _, err := os.Stat("sriov.log"); !os.IsNotExist(err) {
		t.Errorf("it was made: %v", err)
	}
	l.isGolden()
}

// TestWithIPs: the VF does not get the addresses that were requested for another interface.
func TestWithIPs(t *testing.T) {
	conf := `{"args":{"cni":{"ips":["10.0.0.1"]}},"name":"n","runtimeConfig":{"ipRanges":[],"ips":["10.0.0.2"]}}`
	for ips, want := range map[string]string{
		"":         `{"args":{},"name":"n","runtimeConfig":{"ipRanges":[]}}`,
		"10.0.0.3": `{"args":{},"name":"n","runtimeConfig":{"ipRanges":[],"ips":["10.0.0.3"]}}`,
	} {
		if got := string(withIPs([]byte(conf), strings.Fields(ips))); got != want {
			t.Errorf("%q: %s", ips, got)
		}
	}
	if got := string(withIPs([]byte(`{"name":"n"}`), nil)); got != `{"name":"n","runtimeConfig":{}}` {
		t.Error(got)
	}
}

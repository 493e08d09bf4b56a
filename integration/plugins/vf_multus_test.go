// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/harness/card"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// multusDelegate is the conflist that Multus makes of a NetworkAttachmentDefinition: it writes the device ID into each plugin
// (addDeviceIDInConfList in pkg/types/conf.go of multus-cni) and passes it to libcni.
type multusDelegate struct {
	*harness.Network
	list  object
	cache string // cache folder that Multus gives to libcni
}

// fastNet returns the conflist of a network whose VFs have addresses, with the reference plugin tuning after sriov.
func fastNet(name string) object {
	return object{"cniVersion": "1.0.0", "name": name, "plugins": []any{
		object{"type": "sriov", "capabilities": object{"mac": true, "ips": true, "deviceID": true, "CNIDeviceInfoFile": true},
			"ipam": object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "192.0.2.0/24"}}}}},
		object{"type": "tuning", "sysctl": object{"net.ipv4.conf.IFNAME.log_martians": "1"}},
	}}
}

func newDelegate(t *testing.T, list object, device, cache string) multusDelegate {
	t.Helper()
	list = list.With() // a copy
	for _, p := range list["plugins"].([]any) {
		if device != "" {
			p.(map[string]any)["deviceID"], p.(map[string]any)["pciBusID"] = device, device
		}
	}
	d := multusDelegate{list: list, cache: cache}
	var err error
	if d.Network, err = harness.OpenNetwork(harness.Encode(list), cache, nil); err != nil {
		t.Fatal(err)
	}
	path := []string{harness.BinDir(), harness.ReferenceDir()}
	d.CNI = libcni.NewCNIConfigWithCacheDir(path, cache, d.Exec())
	return d
}

// multusRuntimeConf returns the RuntimeConf for one element of the annotation k8s.v1.cni.cncf.io/networks, as newCNIRuntimeConf in
// pkg/types/conf.go of Multus does. Like DelegateAdd of multus.go, it adds MAC and IP for plugins without these capabilities.
func multusRuntimeConf(pod *sandbox.Pod, ifname, device, mac string, ips ...string) *libcni.RuntimeConf {
	caps := map[string]any{"deviceID": device, "CNIDeviceInfoFile": "/run/k8s.cni.cncf.io/devinfo/cni/shop-fast-" + pod.Name + "_" + ifname}
	rt := &libcni.RuntimeConf{ContainerID: pod.Name, NetNS: pod.Path, IfName: ifname, CapabilityArgs: caps,
		Args: [][2]string{{"IgnoreUnknown", "true"},
			{"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_NAME", "web-0"}, {"K8S_POD_INFRA_CONTAINER_ID", pod.Name},
			{"K8S_POD_UID", "0b2c8a9e-5d0e-4f5e-8d0c-000000000001"}}}
	if mac != "" {
		caps["mac"] = mac
		rt.Args = append(rt.Args, [2]string{"MAC", mac})
	}
	if len(ips) > 0 {
		caps["ips"] = ips
		rt.Args = append(rt.Args, [2]string{"IP", strings.Join(ips, ",")})
	}
	return rt
}

// multusNode is a node with a simulated network card and a pod with eth0. Multus runs the pod's other networks one after another.
type multusNode struct {
	pod    *sandbox.Pod
	oracle *harness.Oracle
}

func newMultus(t *testing.T) multusNode {
	t.Helper()
	harness.Need(t, "sriov", "host-local")
	if !harness.Present(harness.ReferenceDir(), "tuning") {
		t.Skip("SKIPPED: the reference's tuning could not be built")
	}
	card.New(t, 0)
	m := multusNode{pod: harness.NewPod(t, harness.Plain(t))}
	warm := harness.NewPod(t, harness.Plain(t)+"-warm")
	for _, name := range []string{"fast", "slow"} {
		d := newDelegate(t, fastNet(name), card.Address(0), t.TempDir())
		d.Must(t, "ADD", multusRuntimeConf(warm, "net1", card.Address(0), ""))
		d.Must(t, "DEL", multusRuntimeConf(warm, "net1", card.Address(0), ""))
	}
	m.oracle = harness.Watch(t, m.pod)
	return m
}

// checkInterface checks that an interface has the wanted MAC and address, both in the result and in the pod.
func (m multusNode) checkInterface(t *testing.T, result object, ifname, mac, address string) {
	t.Helper()
	list, _ := result["interfaces"].([]any)
	i := slices.IndexFunc(list, func(i any) bool { return i.(map[string]any)["name"] == ifname })
	if i < 0 {
		t.Fatalf("no %s in %s", ifname, harness.Encode(result))
	}
	of := list[i].(map[string]any)
	if mac != "" && of["mac"] != mac || of["sandbox"] != m.pod.Path {
		t.Errorf("%v: want mac %s", of, mac)
	}
	ips, _ := result["ips"].([]any)
	if len(ips) != 1 || fmt.Sprint(ips[0].(map[string]any)["interface"]) != fmt.Sprint(i) ||
		address != "" && ips[0].(map[string]any)["address"] != address {
		t.Errorf("addresses %v: want %s on interface %d", ips, address, i)
	}
	shown := harness.Shell(t, "ip -n "+m.pod.Name+" addr show dev "+ifname)
	if !strings.Contains(shown, fmt.Sprint(of["mac"])) || !strings.Contains(shown, fmt.Sprint("inet ", ips[0].(map[string]any)["address"])) ||
		!strings.Contains(shown, ",UP") {
		t.Errorf("in the pod: %s", shown)
	}
}

// TestMultusLife attaches a VF once with all parameters that Multus can pass, and once with the fewest parameters.
func TestMultusLife(t *testing.T) {
	harness.Program(t, "ip")
	m := newMultus(t)
	const mac, ip = "02:00:00:00:00:77", "192.0.2.77/24"
	for title, ask := range harness.InOrder(map[string]func() *libcni.RuntimeConf{
		"mac and ips": func() *libcni.RuntimeConf { return multusRuntimeConf(m.pod, "net1", card.Address(1), mac, ip) },
		"neither":     func() *libcni.RuntimeConf { return multusRuntimeConf(m.pod, "net1", card.Address(1), "") },
	}) {
		t.Run(title, func(t *testing.T) {
			d := newDelegate(t, fastNet("fast"), card.Address(1), t.TempDir())
			rt := ask()
			result := d.Must(t, "ADD", rt)
			if title == "neither" {
				m.checkInterface(t, result, "net1", "", "")
			} else {
				m.checkInterface(t, result, "net1", mac, ip)
			}
			if log := harness.Shell(t, "ip netns exec "+m.pod.Name+" cat /proc/sys/net/ipv4/conf/net1/log_martians"); log != "1\n" {
				t.Errorf("the tuning plugin did not see the interface: log_martians is %s", log)
			}
			d.Must(t, "CHECK", rt)
			d.Must(t, "DEL", rt)
			d.Must(t, "DEL", rt)
			m.oracle.Clean(t, title)
		})
	}
}

// TestMultusDel (F-33, F-34, F-35) runs DEL several times, each time with fewer of the parameters of ADD.
func TestMultusDel(t *testing.T) {
	harness.Program(t, "ip")
	m := newMultus(t)
	device := card.Address(1)
	gone := func(t *testing.T, pod *sandbox.Pod, rt *libcni.RuntimeConf) {
		card.Leave(t, pod.Path, rt.IfName)
		if err := pod.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for title, x := range harness.InOrder(map[string]struct {
		device string // deviceID in the configuration and the runtimeConfig
		cached bool   // libcni has cached the result
		before func(t *testing.T, pod *sandbox.Pod, rt *libcni.RuntimeConf)
	}{
		"netns gone":                        {device, true, gone},
		"netns gone, no prevResult":         {device, false, gone},
		"no netns":                          {device, true, func(_ *testing.T, _ *sandbox.Pod, rt *libcni.RuntimeConf) { rt.NetNS = "" }},
		"no netns, no prevResult":           {device, false, func(_ *testing.T, _ *sandbox.Pod, rt *libcni.RuntimeConf) { rt.NetNS = "" }},
		"no deviceID":                       {"", true, nil},
		"no deviceID, no prevResult":        {"", false, nil},
		"no deviceID, no prevResult, gone":  {"", false, gone},
		"another deviceID by now, no cache": {card.Address(2), false, nil},
	}) {
		t.Run(title, func(t *testing.T) {
			pod := harness.NewPod(t, "multus-del")
			cache := t.TempDir()
			newDelegate(t, fastNet("fast"), device, cache).Must(t, "ADD", multusRuntimeConf(pod, "net1", device, "02:00:00:00:00:77"))
			if !x.cached {
				cache = t.TempDir()
			}
			rt := multusRuntimeConf(pod, "net1", x.device, "")
			if x.device == "" {
				delete(rt.CapabilityArgs, "deviceID")
			}
			if x.before != nil {
				x.before(t, pod, rt)
			}
			d := newDelegate(t, fastNet("fast"), x.device, cache)
			d.Must(t, "DEL", rt)
			card.Tell(t)
			d.Must(t, "DEL", rt)
			_ = pod.Close()
			m.oracle.Clean(t, title)
		})
	}
}

// TestMultusTwo: Multus attaches a pod twice, to one network or to two. Each attachment has its own VF and address, and DEL of one leaves
// the other alone.
func TestMultusTwo(t *testing.T) {
	harness.Program(t, "ip")
	m := newMultus(t)
	for title, names := range harness.InOrder(map[string][2]string{"one network": {"fast", "fast"}, "two networks": {"fast", "slow"}}) {
		t.Run(title, func(t *testing.T) {
			cache := t.TempDir()
			var ds []multusDelegate
			var rts []*libcni.RuntimeConf
			for i, name := range names {
				rt := multusRuntimeConf(m.pod, fmt.Sprint("net", i+1), card.Address(i), "")
				d := newDelegate(t, fastNet(name), card.Address(i), cache)
				m.checkInterface(t, d.Must(t, "ADD", rt), rt.IfName, "", "")
				ds, rts = append(ds, d), append(rts, rt)
			}
			// ADD must refuse a VF or an interface name that the pod's other attachment has.
			if _, err := ds[0].Do("ADD", multusRuntimeConf(m.pod, "net3", card.Address(0), ""), nil); err == nil || harness.Coded(err) != nil {
				t.Errorf("the same VF once more: %v", err)
			}
			ds[0].Must(t, "DEL", multusRuntimeConf(m.pod, "net3", card.Address(0), ""))
			if _, err := ds[1].Do("ADD", multusRuntimeConf(m.pod, "net1", card.Address(1), ""), nil); err == nil || harness.Coded(err) != nil {
				t.Errorf("a name that the pod has: %v", err)
			}
			for i := range ds {
				ds[i].Must(t, "CHECK", rts[i])
			}
			ds[0].Must(t, "DEL", rts[0])
			ds[1].Must(t, "CHECK", rts[1])
			m.checkInterface(t, ds[0].Must(t, "ADD", rts[0]), "net1", "", "")
			for i := range ds { // Multus deletes in reverse order
				ds[len(ds)-1-i].Must(t, "DEL", rts[len(ds)-1-i])
			}
			m.oracle.Clean(t, title)
		})
	}
}

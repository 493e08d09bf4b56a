// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// endPod ends the pod and its namespace. For the kernel, which would move a VF to the node, it moves the veth that stands for the VF:
// the veth is down, keeps its name from the pod and is in sysfs.
func (l testLab) endPod(address string) {
	l.Helper()
	l.addSysfsName(address, "net1")
	l.retrieveLink()
	must(l, l.Pod.Close())
}

// addSysfsName makes the plugin take an interface of this name for the VF's.
func (l testLab) addSysfsName(address, name string) {
	pcitest.Set(l.T, l.sriov.sysfs, address, "net/"+name+"/type", "1")
}

func (l testLab) journalOf(address string) string { return filepath.Join(JournalFolder, address) }

// TestDeadOwner: a pod ended without DEL, and its VF has the changes of a tenant. The next pod gets the VF in its initial state, and a
// late DEL of the first pod does not affect it.
func TestDeadOwner(t *testing.T) {
	l := newLab(t)
	l.allocate(vf1)
	l.add("dead", "mac", "02:00:00:00:00:01", "mtu", 1300)
	l.changeAsTenant("net1")
	l.endPod(vf1)

	next := l.otherPod()
	a := next.add("next")
	if got := describe(next.podLink("net1")); !strings.Contains(got, "mtu 1401") || strings.Contains(got, "02:00:00:00:00") ||
		strings.Contains(got, "promisc true") || strings.Contains(got, "tenant") {
		t.Errorf("the next pod found %s", got)
	}
	l.OK(l.Call("DEL", "dead", "CNI_NETNS", ""))
	next.OK(a.check())
	next.del("next")
}

// TestHeld: a VF stays with its pod, even if the kubelet allocates it to another.
func TestHeld(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0, vf1)
	a := l.add("a")
	b := l.otherPod()
	l.allocate(vf2, vf1)
	o := b.Call("ADD", "b")
	b.Fails(o, plugin.CodeDevice, "VF 0000:11:02.1: pod shop/web-0 has it since 20")
	if !strings.Contains(o.Failure.Details, "delete that pod if it should not have it (container a, eth0 in network net)") {
		t.Errorf("%q", o.Failure.Details)
	}
	l.OK(a.check())
	l.OK(b.Call("DEL", "b"))
	l.OK(a.check())
	l.del("a")
	b.add("b")
	b.del("b")
}

// TestNoNetns: DEL finds the VF in the pod although the runtime passes no namespace.
func TestNoNetns(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0, vf1)
	l.add("a")
	l.changeAsTenant("net2")
	l.del("a", "CNI_NETNS", "")
}

// TestNamespaceGone: DEL finds a VF that the kernel moved back to the node by its PCI address, even if its name has changed or another
// interface has its former name.
func TestNamespaceGone(t *testing.T) {
	gone := func(t *testing.T) testLab {
		l := newLab(t)
		l.allocate(vf1)
		l.add("a")
		l.changeAsTenant("net1")
		l.endPod(vf1)
		return l
	}
	t.Run("its name is free", func(t *testing.T) { gone(t).del("a") })
	t.Run("its name is taken", func(t *testing.T) {
		l := gone(t)
		must(t, l.host.AddBridge("ens0f0v1", nil, 0, false, false))
		must(t, os.RemoveAll(filepath.Join(pcitest.Folder(t, l.sriov.sysfs, vf1), "net/ens0f0v1"))) // the interface is not the VF's
		l.addSysfsName(vf1, nameByAddress(address(t, vf1)))
		o := l.OK(l.Call("DEL", "a"))
		if !strings.Contains(o.Log, "another interface has the VF's former name") {
			t.Errorf("log: %s", o.Log)
		}
		link := l.link(nameByAddress(address(t, vf1)))
		must(t, l.host.DelLink("ens0f0v1"), l.host.SetDown(link), l.host.Rename(link, "ens0f0v1"), l.host.SetUp(l.link("ens0f0v1")))
		l.isGolden()
	})
}

// TestSquatted: a pod gives its VF the name that another VF has on the node, and ends. After DEL, all VFs have their former names.
func TestSquatted(t *testing.T) {
	for _, how := range []string{"name", "alternative name", "alternative name of another"} {
		t.Run(how, func(t *testing.T) {
			l := newLab(t)
			l.allocate(vf1)
			l.add("bad")
			good := l.otherPod()
			l.allocate(vf0)
			good.add("good")
			called := "net1"
			l.inPod(func(pod *kernel.NS) {
				link, _, err := pod.Link("net1")
				must(t, err)
				switch how {
				case "name":
					called = "ens0f0v0"
				case "alternative name":
					must(t, pod.AddAltName(link, "ens0f0v0"))
				default:
					must(t, pod.AddAltName(link, "alt-ens0f0v0"))
				}
				must(t, pod.SetDown(link), pod.Rename(link, called))
			})
			l.addSysfsName(vf1, called)
			l.returnLinkAs(called)
			must(t, l.Pod.Close())
			forget := func(address, name string) { // sysfs shows the name for one VF only
				must(t, os.RemoveAll(filepath.Join(pcitest.Folder(t, l.sriov.sysfs, address), "net", name)))
			}
			forget(vf0, called)
			o := good.OK(good.Call("DEL", "good"))
			if !strings.Contains(o.Log, "a pod renamed its VF to a name that belongs to another VF") {
				t.Errorf("log: %s", o.Log)
			}
			if how == "name" {
				forget(vf1, called)
				l.addSysfsName(vf1, temporaryName(address(t, vf1)))
			}
			l.del("bad", "CNI_NETNS", "")
		})
	}
}

// TestVFGone: after the removal of a VF from the node, DEL has nothing to restore and succeeds.
func TestVFGone(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0, vf1)
	was, peer := l.link("ens0f0v1"), l.link("ens0f0v1peer")
	a := l.add("a")
	l.inPod(func(pod *kernel.NS) { must(t, pod.DelLink("net2")) })
	pcitest.Remove(t, l.sriov.sysfs, vf1)
	l.Fails(a.check(), plugin.CodeStateDiffers, "VF 0000:11:02.1 of interface net2 does not exist")
	l.OK(l.Call("DEL", "a"))
	l.golden = strings.Join(strings.SplitAfter(l.golden, "\n")[2:], "")
	if got := l.nodeLinks(); !strings.HasPrefix(got, "ens0f0v0 ") || !strings.HasSuffix(got, l.golden) {
		t.Error(got)
	}
	if _, err := os.Stat(l.journalOf(vf1)); !os.IsNotExist(err) {
		t.Errorf("journal: %v", err)
	}
	l.addVF("ens0f0v1", 1401) // for the final comparison
	must(t, l.host.SetMAC(l.link("ens0f0v1"), was.MAC), l.host.SetMAC(l.link("ens0f0v1peer"), peer.MAC))
}

// TestRecordLost: without the record, the journals identify the VFs of an attachment.
func TestRecordLost(t *testing.T) {
	record := store.Root + "/net/sriov-" + attachment.Key{Network: "net", ContainerID: "a", IfName: "eth0"}.Hash()
	for _, lost := range []string{record, store.Root + "/net"} {
		t.Run(filepath.Base(lost), func(t *testing.T) {
			l := newLab(t)
			l.allocate(vf0, vf1)
			a := l.add("a")
			must(t, os.RemoveAll(lost))
			l.Fails(a.check(), plugin.CodeStateDiffers, "the record of the pod's VFs is missing")
			l.OK(l.Call("DEL", "b"))
			l.podLink("net2")
			l.del("a", "prevResult", a.prev)
		})
	}
}

// TestJournalLost: without the journal, DEL cannot restore the VF, and says what can. It says nothing of the VFs that a killed ADD had not
// reached.
func TestJournalLost(t *testing.T) {
	const says = "podlace sriov reset " + vf0
	for _, lost := range []string{filepath.Join(JournalFolder, vf0), JournalFolder} {
		t.Run(filepath.Base(lost), func(t *testing.T) {
			l := newLab(t)
			l.allocate(vf0)
			a := l.add("a")
			text, err := os.ReadFile(l.journalOf(vf0))
			must(t, err, os.RemoveAll(lost))
			if o := l.OK(l.Call("DEL", "a")); strings.Count(o.Log, says) != 1 {
				t.Errorf("log: %s", o.Log)
			}
			must(t, os.MkdirAll(JournalFolder, 0o700), os.WriteFile(l.journalOf(vf0), text, 0o600))
			l.del("a", "prevResult", a.prev)
			att, err := attachment.Open(&plugin.Request{Plugin: "sriov", Network: "net", ContainerID: "a", IfName: "eth0", NetnsPath: l.Pod.Path})
			must(t, err, att.Save(attachmentState{VFs: []vf{{Address: address(t, vf0), Name: "net1"}}, Unfinished: true}))
			att.Close()
			if o := l.OK(l.Call("DEL", "a")); strings.Contains(o.Log, says) {
				t.Errorf("log: %s", o.Log)
			}
		})
	}
}

// TestInterrupted: the next ADD with the same key removes the residue of a killed ADD, but not the state of one that finished.
func TestInterrupted(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0, vf1)
	a := l.add("a", "mtu", 1300)
	l.Fails(l.Call("ADD", "a"), plugin.CodeAddressTaken, "interface net1 already exists")
	l.OK(a.check())
	path := store.Root + "/net/sriov-" + attachment.Key{Network: "net", ContainerID: "a", IfName: "eth0"}.Hash()
	text, err := os.ReadFile(path)
	must(t, err, os.WriteFile(path, []byte(strings.Replace(string(text), `"state":{`, `"state":{"unfinished":true,`, 1)), 0o600))
	l.changeAsTenant("net1")
	a = l.add("a")
	if got := l.podLink("net1"); got.MTU != 1400 {
		t.Errorf("%s", describe(got))
	}
	l.OK(a.check())
	l.del("a")
}

// TestHostileJournals: no pod gets a VF with an invalid journal, and DEL of the pod that has it fails.
func TestHostileJournals(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0)
	l.add("a")
	good, err := os.ReadFile(l.journalOf(vf0))
	must(t, err)
	for name, bad := range map[string]string{
		"nothing":      "",
		"torn":         string(good[:len(good)/2]),
		"newer":        strings.Replace(string(good), `"format":1`, `"format":2`, 1),
		"another VF":   strings.Replace(string(good), vf0, vf1, 1),
		"no owner":     strings.Replace(string(good), `"containerID":"a"`, `"containerID":""`, 1),
		"a path":       strings.Replace(string(good), `"name":"ens0f0v0"`, `"name":"../../x"`, 1),
		"another path": strings.Replace(string(good), `"name":"net1"`, `"name":"a/b"`, 1),
		"no netns":     strings.Replace(string(good), `"netns":"/`, `"netns":"`, 1),
	} {
		if bad == string(good) {
			t.Fatalf("%s: the same", name)
		}
		must(t, os.WriteFile(l.journalOf(vf0), []byte(bad), 0o600))
		for verb, pod := range map[string]testLab{"ADD": l.otherPod(), "DEL": l} {
			o := pod.Call(verb, map[string]string{"ADD": "b", "DEL": "a"}[verb])
			pod.Fails(o, plugin.CodeDevice, "journal of VF 0000:11:02.0: ")
			if !strings.Contains(o.Failure.Details,
				"'podlace sriov reset 0000:11:02.0 --yes' sets the VF to its defaults, and removes /run/podlace/.vfs/0000:11:02.0") {
				t.Errorf("%s: %q", name, o.Failure.Details)
			}
		}
		l.podLink("net1")
	}
	must(t, os.WriteFile(l.journalOf(vf0), good, 0o600))
	// The namespace path in the journal leads to a file that is no namespace, or to the node's namespace. DEL then finds the VF on the
	// node.
	for _, netns := range []string{"/dev/null", "/proc/thread-self/ns/net"} {
		l.addSysfsName(vf0, "net1")
		must(t, os.WriteFile(l.journalOf(vf0), []byte(strings.Replace(string(good), l.Pod.Path, netns, 1)), 0o600))
		l.retrieveLink()
		l.del("a")
		l.add("a")
		good, err = os.ReadFile(l.journalOf(vf0))
		must(t, err)
	}
	l.del("a")
}

// retrieveLink moves net1 of a live pod to the node, as the kernel does.
func (l testLab) retrieveLink() { l.returnLinkAs("net1") }

func (l testLab) returnLinkAs(name string) {
	l.Helper()
	home, err := l.host.File()
	must(l, err)
	defer home.Close()
	l.inPod(func(pod *kernel.NS) {
		link, _, err := pod.Link(name)
		must(l, err, pod.SetDown(link), pod.MoveLink(link, home, name))
	})
}

// TestGC: GC restores the VFs of stale attachments, with or without a record.
func TestGC(t *testing.T) {
	l := newLab(t, "ipam", object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.61.0.0/24"}}}})
	l.allocate(vf0)
	l.add("a")
	b := l.otherPod()
	l.allocate(vf1)
	b.add("b")
	c := l.otherPod()
	l.allocate(vf2)
	live := c.add("c")
	must(t, os.Remove(store.Root+"/net/sriov-"+attachment.Key{Network: "net", ContainerID: "b", IfName: "eth0"}.Hash()))
	journal := l.journalOf(vf1)
	text, err := os.ReadFile(journal)
	must(t, err)
	var j map[string]any
	must(t, json.Unmarshal(text, &j))
	j["since"] = "2020-01-01T00:00:00Z"
	text, err = json.Marshal(j)
	must(t, err, os.WriteFile(journal, text, 0o600), kerneltest.Age(kerneltest.StateDirs()...))
	for range 2 {
		l.OK(l.Call("GC", "", "prevResult", nil, "cni.dev/valid-attachments", []any{object{"containerID": "c", "ifname": "eth0"}}))
		c.OK(live.check())
		if all, err := Holdings(); err != nil || len(all) != 1 || all[0].Owner.ContainerID != "c" {
			t.Errorf("%+v, %v", all, err)
		}
	}
	if leases, _ := filepath.Glob("/var/lib/cni/networks/net.vf/10.*"); len(leases) != 1 {
		t.Errorf("leases %v", leases)
	}
	c.del("c")
}

// TestCheck: CHECK reports every difference from the result of ADD.
func TestCheck(t *testing.T) {
	l := newLab(t, "ipam", object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.61.0.0/24"}}},
		"routes": []any{object{"dst": "192.0.2.0/24"}}})
	l.allocate(vf0)
	a := l.add("a")
	l.OK(a.check())
	l.inPod(func(pod *kernel.NS) {
		link, _, err := pod.Link("net1")
		must(t, err)
		own, err := pod.Addresses(link)
		must(t, err)
		for _, c := range []struct {
			says        string
			spoil, mend func() error
		}{
			{"interface net1 is down", func() error { return pod.SetDown(link) }, func() error { return pod.SetUp(link) }},
			{"interface net1 has mtu 1450, want 1400", func() error { return pod.SetMTU(link, 1450) },
				func() error { return pod.SetMTU(link, 1400) }},
			{"interface net1 has MAC 02:00:00:00:00:01, want", func() error { return pod.SetMAC(link, []byte{2, 0, 0, 0, 0, 1}) },
				func() error { return pod.SetMAC(link, link.MAC) }},
			{"address 10.61.0.2/24 is missing on net1", func() error { return pod.DelAddress(link, own[0]) }, nil},
		} {
			must(t, c.spoil())
			l.Fails(a.check(), plugin.CodeStateDiffers, c.says)
			if c.mend != nil {
				must(t, c.mend())
			}
		}
		must(t, pod.AddAddress(link, own[0], true))
		l.Fails(a.check(), plugin.CodeStateDiffers, "route to 192.0.2.0/24 through net1 is missing")
		must(t, pod.SetDown(link), pod.Rename(link, "net9"))
		l.Fails(a.check(), plugin.CodeStateDiffers, "interface net1 of VF 0000:11:02.0 is missing in the pod")
		must(t, pod.Rename(link, "net1"), pod.SetUp(link))
	})
	text, err := os.ReadFile(l.journalOf(vf0))
	must(t, err, os.Remove(l.journalOf(vf0)))
	l.Fails(a.check(), plugin.CodeStateDiffers, "the journal of VF 0000:11:02.0 is missing")
	must(t, os.WriteFile(l.journalOf(vf0), text, 0o600))
	l.del("a")
}

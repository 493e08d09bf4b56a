// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/pkg/plugin"
)

// TestDelLeavesAnothers (C-49, C-50, C-52): DEL without a record never deletes a link of a live attachment, although prevResult has that
// one's interface name and MAC. It is called with and without the namespace, for a deleted and an unknown container, and for another
// network.
func TestDelLeavesAnothers(t *testing.T) {
	l := newLab(t, "capabilities", object{"ips": true}, "runtimeConfig", object{"ips": []string{"10.60.0.50"}})
	old := l.add("old")
	l.OK(l.Call("DEL", "old", "prevResult", old.prev))
	a := l.add("new")
	if a.result.Interfaces[2].Mac != old.result.Interfaces[2].Mac {
		t.Fatalf("the MAC does not follow from the address: %s, %s", old.prev, a.prev)
	}
	for _, netns := range []string{l.Pod.Path, ""} {
		for what, prev := range map[string]any{"the old": old.prev, "the new": a.prev} {
			for _, id := range []string{"old", "unknown"} {
				l.OK(l.Call("DEL", id, "CNI_NETNS", netns, "prevResult", prev))
				if o := a.check(); o.Exit != 0 {
					t.Fatalf("after DEL %s in %q with the result of %s: %s", id, netns, what, o.Stdout)
				}
			}
		}
		l.OK(l.Call("DEL", "new", "CNI_NETNS", netns, "name", "net2", "prevResult", a.prev))
		l.OK(a.check())
	}
	a.loseRecord()
	l.OK(l.Call("DEL", "unknown", "prevResult", a.prev))
	if _, err := ifIndex(l, "eth0"); err != nil {
		t.Errorf("without a record: %v", err)
	}
}

func ifIndex(l lab, name string) (index int, err error) {
	err = l.inPod(name, func(link netlink.Link) error { index = link.Attrs().Index; return nil })
	return index, err
}

// TestShortPoolSparesRenewed (F-44): the recorded namespace of a pod is gone, because the reference plugin attached it again in another
// one, with a lease newer than the record. Another pod's ADD must not take this lease from an exhausted pool, and the pod's DEL must
// release it.
func TestShortPoolSparesRenewed(t *testing.T) {
	l := newLab(t, "name", "renewed", "bridge", "btr0", "ipam", object{"type": "host-local", "subnet": "10.63.0.0/30"})
	l.OK(l.Call("ADD", "pod"))
	lease := "/var/lib/cni/networks/renewed/10.63.0.2"
	if err := os.Remove(lease); err != nil {
		t.Fatal(err)
	}
	time.Sleep(10 * time.Millisecond) // file times have the resolution of the kernel's tick
	if err := os.WriteFile(lease, []byte("pod\r\neth0"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := l.Pod.Close(); err != nil {
		t.Fatal(err)
	}
	other := l.other()
	for range 2 {
		l.Fails(other.Call("ADD", "next"), plugin.CodeExhausted, "no IP addresses available")
	}
	l.OK(l.Call("DEL", "pod"))
	other.add("next")
}

// attachAsReference attaches a container with one address as the reference plugin does, and returns the result.
func (l lab) attachAsReference(id, address string) object {
	l.Helper()
	const veth = "veth0a1b2c3d"
	pod, err := os.Open(l.Pod.Path)
	if err != nil {
		l.Fatal(err)
	}
	defer pod.Close()
	bridge, err := netlink.LinkByName(l.Conf["bridge"].(string))
	if err != nil {
		l.Fatal(err)
	}
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: veth, MasterIndex: bridge.Attrs().Index}, PeerName: "eth0",
		PeerNamespace: netlink.NsFd(int(pod.Fd()))}); err != nil {
		l.Fatal(err)
	}
	var podMAC string
	if err := l.inPod("eth0", func(link netlink.Link) error { podMAC = link.Attrs().HardwareAddr.String(); return nil }); err != nil {
		l.Fatal(err)
	}
	if err := os.WriteFile("/var/lib/cni/networks/"+l.network()+"/"+address, []byte(id+"\r\neth0"), 0o600); err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { // this also removes the table, which the reference plugin leaves
		c, err := nftables.New()
		if err != nil {
			l.Fatal(err)
		}
		c.DelTable(&nftables.Table{Name: "cni_plugins_masquerade", Family: nftables.TableFamilyINet})
		if err := c.Flush(); err != nil {
			l.Error(err)
		}
	})
	own := []netip.Prefix{netip.PrefixFrom(netip.MustParseAddr(address), 24)}
	if err := asReference(key(l.network(), id)).WriteMasquerade(own, nil); err != nil {
		l.Fatal(err)
	}
	return object{"cniVersion": "1.0.0", "ips": []any{object{"address": address + "/24", "interface": 2}}, "interfaces": []any{
		object{"name": bridge.Attrs().Name, "mac": bridge.Attrs().HardwareAddr.String()},
		object{"name": veth, "mac": mac(l.T, veth)}, object{"name": "eth0", "mac": podMAC, "sandbox": l.Pod.Path}}}
}

// TestDelOfSuccessor (F-44): one DEL, with or without a namespace and prevResult, removes both attachments of a container that Podlace
// attached first, and then the reference plugin, which does not know Podlace's record.
func TestDelOfSuccessor(t *testing.T) {
	for what, c := range map[string]struct{ gone, noResult bool }{
		"namespace and result": {}, "namespace": {noResult: true}, "result": {gone: true}, "nothing": {gone: true, noResult: true},
	} {
		t.Run(what, func(t *testing.T) { testDelOfSuccessor(t, c.gone, c.noResult) })
	}
}

func testDelOfSuccessor(t *testing.T, gone, noResult bool) {
	l := newLab(t)
	a := l.add("a")
	if err := l.inPod("eth0", netlink.LinkDel); err != nil {
		t.Fatal(err)
	}
	for _, ip := range a.result.IPs {
		if err := os.Remove("/var/lib/cni/networks/net/" + ip.Address.IP.String()); err != nil {
			t.Fatal(err)
		}
	}
	prev := l.attachAsReference("a", "10.60.0.77")
	if gone {
		if err := l.Pod.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if noResult {
		l.OK(l.Call("DEL", "a", "cniVersion", "0.3.1"))
	} else {
		l.OK(l.Call("DEL", "a", "prevResult", prev))
	}
	if !gone {
		if _, err := ifIndex(l, "eth0"); err == nil {
			t.Error("the pod has eth0")
		}
	}
	if rules := nftRules(t, "inet cni_plugins_masquerade masq_checks"); len(rules) > 0 || len(listLeases(t)) > 0 || l.recordCount("a") > 0 {
		t.Errorf("left %q, leases %v, %d records", rules, listLeases(t), l.recordCount("a"))
	}
}

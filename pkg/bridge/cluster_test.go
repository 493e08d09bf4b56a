// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

func writeNode(t *testing.T, content string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(nodefile.Path), 0o700), os.WriteFile(nodefile.Path, []byte(content), 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(nodefile.Path) })
}

// mustExcept expects the pod's masquerade to exempt all destinations in want and none in not.
func (a attached) mustExcept(want, not string) {
	a.Helper()
	if a.Conf["ipMasqBackend"] != "iptables" {
		if err := a.masquerades("", want); err != nil {
			a.Error(err)
		}
		for _, cidr := range strings.Fields(not) {
			if a.masquerades("", cidr) == nil {
				a.Errorf("%s is excepted", cidr)
			}
		}
		return
	}
	for _, cidr := range strings.Fields(want + " " + not) {
		nat, err := iptables.List(!strings.Contains(cidr, ":"), masqueradeChain(key(a.network(), a.id)))
		has := len(nat.Rules(masqueradeChain(key(a.network(), a.id)), "-d "+cidr+" ", "-j ACCEPT")) > 0
		if err != nil || has != strings.Contains(want, cidr) {
			a.Errorf("exception for %s: %t, %v", cidr, has, err)
		}
	}
}

func discard() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// TestClusterCIDR: useClusterCidr means the CIDRs in node.json, whose changes reach running pods. Without the file, the last ones stay.
func TestClusterCIDR(t *testing.T) {
	kerneltest.Slow(t)
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) {
			if backend == "iptables" && (!iptables.Installed(true) || !iptables.Installed(false)) {
				t.Skip("SKIPPED: iptables is not installed")
			}
			l := bareLab(t, "name", "cluster"+backend, "bridge", "btcluster", "ipMasqBackend", backend,
				"ipMasq", object{"nonMasqueradeCIDRs": []string{"USEclusterCIDR", "192.168.0.0/16"}})
			t.Cleanup(func() { _ = onHost("btcluster", netlink.LinkDel) })
			l.mustMiss("neither /run/podlace/node.json nor")
			writeNode(t, `{"podCIDRs":["10.60.0.0/24"]}`)
			l.mustMiss("/run/podlace/node.json has no clusterCIDRs")

			writeNode(t, `{"podCIDRs":["10.60.0.0/24"],"clusterCIDRs":["10.70.0.0/16","fd00:70::/48"]}`)
			l.OK(l.Call("STATUS", ""))
			a, b := l.add("a"), l.other().add("b")
			a.mustExcept("10.70.0.0/16 fd00:70::/48 192.168.0.0/16", "10.80.0.0/16")
			l.OK(a.check())
			gc := []any{"cni.dev/valid-attachments",
				[]any{object{"containerID": "a", "ifname": "eth0"}, object{"containerID": "b", "ifname": "eth0"}}}
			if backend == "nftables" { // CHECK reports the missing exception
				set := MasqueradeSets{Network: l.network()}.setName("local", "4")
				l.run("nft delete element inet podlace_masquerade " + set + " '{ 10.70.0.0/16 }'")
				l.Fails(a.check(), plugin.CodeStateDiffers, "10.70.0.0/16")
				l.OK(l.Call("GC", "", gc...))
				l.OK(a.check())
			}

			if err := os.Remove(nodefile.Path); err != nil {
				t.Fatal(err)
			}
			l.OK(a.check())
			l.OK(b.Call("DEL", "b"))
			l.OK(l.Call("GC", "", "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}))
			if err := RenewClusterCIDRs(discard()); err != nil {
				t.Fatal(err)
			}
			a.mustExcept("10.70.0.0/16 fd00:70::/48 192.168.0.0/16", "10.80.0.0/16")
			l.mustMiss("neither /run/podlace/node.json nor")

			writeNode(t, `{"podCIDRs":["10.60.0.0/24"],"clusterCIDRs":["10.80.0.0/16","192.168.0.0/16"]}`)
			l.OK(a.check())
			for range 2 {
				if err := RenewClusterCIDRs(discard()); err != nil {
					t.Fatal(err)
				}
				a.mustExcept("10.80.0.0/16 192.168.0.0/16", "10.70.0.0/16 fd00:70::/48")
				l.OK(a.check())
			}
			writeNode(t, `{"podCIDRs":["10.60.0.0/24"],"clusterCIDRs":["10.90.0.0/16"]}`)
			l.OK(l.Call("GC", "", "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}))
			a.mustExcept("10.90.0.0/16 192.168.0.0/16", "10.80.0.0/16")
			l.OK(a.check())

			l.run("nft flush ruleset")
			l.OK(l.Call("STATUS", ""))
			a.mustExcept("10.90.0.0/16 192.168.0.0/16", "10.80.0.0/16")
		})
	}
}

// mustMiss expects ADD and STATUS to fail with a hint if node.json lacks a value, and ADD to leave no state.
func (l lab) mustMiss(text string) {
	l.Helper()
	o := l.other()
	for verb, code := range map[string]uint{"ADD": plugin.CodeConfig, "STATUS": plugin.CodeNotAvailable} {
		out := o.Call(verb, "missing")
		o.Fails(out, code, "ipMasq.nonMasqueradeCIDRs useClusterCidr: ")
		if all := string(out.Stdout); !strings.Contains(all, text) || !strings.Contains(all, "podlace-node writes the file") {
			l.Errorf("%s: %s", verb, all)
		}
	}
	if records, err := attachment.List(l.network(), "bridge"); err != nil || len(records) > 1 {
		l.Errorf("%v, %v", records, err)
	}
}

// TestClusterCIDRRenewsOnce: RenewClusterCIDRs writes nothing to the kernel or the records if the CIDRs have not changed.
func TestClusterCIDRRenewsOnce(t *testing.T) {
	l := bareLab(t, "name", "renewed", "bridge", "btrenew", "ipMasq", object{"nonMasqueradeCIDRs": []string{"useClusterCidr"}})
	t.Cleanup(func() { _ = onHost("btrenew", netlink.LinkDel) })
	writeNode(t, `{"podCIDRs":["10.60.0.0/24"],"clusterCIDRs":["10.70.0.0/16"]}`)
	l.add("a")
	handles := func() string { return l.run("nft -a list table inet podlace_masquerade") }
	before := handles()
	if err := RenewClusterCIDRs(discard()); err != nil || handles() != before {
		t.Errorf("the table was written: %v", err)
	}
	writeNode(t, `{"podCIDRs":["10.60.0.0/24"],"clusterCIDRs":["10.71.0.0/16"]}`)
	if err := RenewClusterCIDRs(discard()); err != nil || handles() == before {
		t.Errorf("the table was not written: %v", err)
	}
	damaged := filepath.Join(store.Root, "renewed", ".masqueraded")
	if err := os.WriteFile(damaged, []byte(`{"v4":"x","cluster":1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	before = handles()
	writeNode(t, `{"podCIDRs":["10.60.0.0/24"],"clusterCIDRs":["10.72.0.0/16"]}`)
	if err := RenewClusterCIDRs(discard()); err != nil || handles() != before {
		t.Errorf("a damaged note removed masquerade: %v", err)
	}
}

// TestMTUOfNode: "mtu": "auto" uses the MTU in node.json or, without the file, that of the uplink.
func TestMTUOfNode(t *testing.T) {
	l := bareLab(t, "name", "nodemtu", "bridge", "btnodemtu", "mtu", "auto")
	t.Cleanup(func() { _ = onHost("btnodemtu", netlink.LinkDel) })
	mtu := func(id string, want int) {
		t.Helper()
		a := l.other().add(id)
		link, ok, err := a.host().Link(a.hostVeth())
		if err != nil || !ok || link.MTU != want {
			t.Errorf("%s: MTU %d, want %d; %v", id, link.MTU, want, err)
		}
		l.OK(a.check())
	}
	mtu("uplink", 1500)
	writeNode(t, `{"podCIDRs":["10.60.0.0/24"],"mtu":1410}`)
	mtu("node", 1410)
	writeNode(t, `{"podCIDRs":["10.60.0.0/24"]}`)
	mtu("without", 1500)
	writeNode(t, `{"podCIDRs":["10.60.0.0/24"],"mtu":1}`)
	l.Fails(l.Call("ADD", "wrong"), plugin.CodeConfig, "mtu auto: /run/podlace/node.json: mtu 1: want a number of bytes")
	l.Fails(l.Call("STATUS", ""), plugin.CodeNotAvailable, "mtu auto: /run/podlace/node.json: mtu 1")
}

// TestNodeFileIsReadOnce: ADD reads node.json once for both "auto" and useClusterCidr, and never without these keywords.
func TestNodeFileIsReadOnce(t *testing.T) {
	writeNode(t, `{"podCIDRs":["10.61.0.0/24","fd00:61::/64"],"clusterCIDRs":["10.61.0.0/16"],"mtu":1400}`)
	pods := object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "usePodCidr"}}, []any{object{"subnet": "usePodCidrIPv6"}}}}
	for want, keys := range [][]any{{"name", "wordless", "bridge", "btonce0"},
		{"name", "words", "bridge", "btonce1", "mtu", "auto", "ipam", pods, "ipMasq", object{"nonMasqueradeCIDRs": []string{"useClusterCidr"}}}} {
		l := bareLab(t, keys...)
		l.add("first")
		watch, err := unix.InotifyInit1(unix.IN_NONBLOCK)
		if err == nil {
			// The close events separate two open events, which inotify would merge.
			_, err = unix.InotifyAddWatch(watch, nodefile.Path, unix.IN_OPEN|unix.IN_CLOSE_NOWRITE)
		}
		if err != nil {
			t.Fatal(err)
		}
		opened := func() int {
			events := make([]byte, 4096)
			n, _ := unix.Read(watch, events)
			return max(0, n) / unix.SizeofInotifyEvent / 2
		}
		next := l.other()
		for verb, call := range map[string]func(){"ADD": func() { next.add("b") }, "STATUS": func() { l.OK(l.Call("STATUS", "")) }} {
			call()
			if got := opened(); got != want {
				t.Errorf("%s of %s opened the file %d times, want %d", verb, l.network(), got, want)
			}
		}
		unix.Close(watch)
		_ = onHost(l.Conf["bridge"].(string), netlink.LinkDel)
	}
}

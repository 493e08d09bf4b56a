// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/plugin"
)

const one = `"ranges":[[{"subnet":"10.1.2.0/24"}]]`

// TestFiles checks every byte of the files that other programs read.
func TestFiles(t *testing.T) {
	l := newLab(t, `"ranges":[[{"subnet":"10.1.2.0/24"},{"subnet":"10.2.2.0/24"}],[{"subnet":"2001:db8:1::/48"}]],
		"routes":[{"dst":"0.0.0.0/0"},{"dst":"192.168.0.0/16","gw":"1.1.1.1"}]`)
	a := l.call("ADD", "0123abcd", "")
	if a.addresses() != "10.1.2.2/24 2001:db8:1::2/48" || a.IPs[0].Gateway != "10.1.2.1" || a.IPs[1].Gateway != "2001:db8:1::1" ||
		len(a.Routes) != 2 {
		t.Errorf("got %+v", a)
	}
	want := map[string]string{
		"10.1.2.2": `600 "0123abcd\r\neth0"`, "2001:db8:1::2": `600 "0123abcd\r\neth0"`, "lock": `750 ""`,
		"last_reserved_ip.0": `600 "10.1.2.2"`, "last_reserved_ip.1": `600 "2001:db8:1::2"`,
	}
	if diff := cmp.Diff(want, l.files()); diff != "" {
		t.Error(diff)
	}
	l.ok(l.call("CHECK", "0123abcd", prev("10.1.2.2/24", "2001:db8:1::2/48")))
	for range 2 {
		l.ok(l.call("DEL", "0123abcd", ""))
	}
	delete(want, "10.1.2.2")
	delete(want, "2001:db8:1::2")
	if diff := cmp.Diff(want, l.files()); diff != "" {
		t.Errorf("after DEL:\n%s", diff)
	}
	if info, err := os.Stat(l.dir); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("folder: %v, %v", info.Mode(), err)
	}
}

// The address that was released last is not assigned next.
func TestRoundRobin(t *testing.T) {
	l := newLab(t, `"subnet":"10.1.2.0/29"`)
	l.mustGive("a", "10.1.2.2/29")
	l.mustGive("b", "10.1.2.3/29")
	l.ok(l.call("DEL", "b", ""))
	l.mustGive("c", "10.1.2.4/29")
	l.ok(l.call("DEL", "a", ""))
	l.mustGive("d", "10.1.2.5/29")
	l.mustGive("e", "10.1.2.6/29")
	l.mustGive("f", "10.1.2.2/29")
	l.mustGive("g", "10.1.2.3/29")
	l.mustFail(l.call("ADD", "h", ""), plugin.CodeExhausted, "no IP addresses available in range set: 10.1.2.1-10.1.2.6")
}

// last_reserved_ip only says where ADD begins its search; ADD succeeds whatever it contains.
func TestLastReserved(t *testing.T) {
	for content, want := range map[string]string{
		"": "10.1.2.2", "garbage": "10.1.2.2", "\x00\x00": "10.1.2.2", "10.1.2.300": "10.1.2.2", "192.0.2.9": "10.1.2.2", "fd00::1": "10.1.2.2",
		"10.1.2.9\n": "10.1.2.10", "10.1.2.254": "10.1.2.2", "10.1.2.255": "10.1.2.2", "10.1.2.0": "10.1.2.2", "10.1.2.4": "10.1.2.6",
	} {
		l := newLab(t, one)
		l.put("last_reserved_ip.0", content)
		l.put("10.1.2.5", "other\r\neth0")
		l.mustGive("a", want+"/24")
		if got := l.files()["last_reserved_ip.0"]; !strings.HasSuffix(got, fmt.Sprintf(" %q", want)) {
			t.Errorf("%q became %s, want %s", content, got, want)
		}
	}
}

func TestDuplicateAdd(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	l.mustFail(l.call("ADD", "a", ""), plugin.CodeAddressTaken, "10.1.2.2 has been allocated to a, duplicate allocation is not allowed")
	if a := l.callFor("ADD", plugin.Attachment{ContainerID: "a", IfName: "net1"}, ""); a.addresses() != "10.1.2.3/24" {
		t.Errorf("second interface: %+v", a)
	}
	l.mustGive("b", "10.1.2.4/24")
	l.ok(l.call("DEL", "a", ""))
	if files := l.files(); files["10.1.2.2"] != "" || files["10.1.2.3"] == "" || files["10.1.2.4"] == "" {
		t.Errorf("DEL of one interface left %v", files)
	}
}

func TestOldFormat(t *testing.T) {
	l := newLab(t, one)
	l.put("10.1.2.7", "  old-id \n")
	l.ok(l.call("CHECK", "old-id", prev("10.1.2.7/24")))
	l.ok(l.call("DEL", "old", ""))
	if l.files()["10.1.2.7"] == "" {
		t.Error("the DEL of another container took it")
	}
	l.ok(l.call("DEL", "old-id", ""))
	if l.files()["10.1.2.7"] != "" {
		t.Error("DEL left it")
	}
}

// Container IDs may look like an address or like a file of this plugin (C-52).
func TestIDsLikeAddresses(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("10.1.2.3", "10.1.2.2/24")
	l.mustGive("last_reserved_ip.0", "10.1.2.3/24")
	l.mustGive("lock", "10.1.2.4/24")
	l.ok(l.call("DEL", "10.1.2.3", ""))
	if files := l.files(); files["10.1.2.2"] != "" || files["10.1.2.3"] == "" {
		t.Errorf("left %v", files)
	}
	l.ok(l.call("DEL", "lock", ""))
	l.ok(l.call("DEL", "last_reserved_ip.0", ""))
	if got := l.files(); len(got) != 2 || got["lock"] == "" {
		t.Errorf("left %v", got)
	}
}

// Files that are no leases are neither read nor removed. ADD assigns the address of an empty lease.
func TestForeignFiles(t *testing.T) {
	l := newLab(t, one)
	l.put("README", "a\r\neth0")
	l.put("10.1.2.2", "")
	l.put("10.1.2.3", "a b c")
	l.put("300.1.2.3", "a\r\neth0")
	if err := os.MkdirAll(filepath.Join(l.dir, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	l.mustGive("a", "10.1.2.2/24")
	l.ok(l.call("DEL", "a", ""))
	l.age()
	l.ok(l.call("GC", "", `"cni.dev/valid-attachments":[]`))
	entries, _ := os.ReadDir(l.dir)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if diff := cmp.Diff([]string{"300.1.2.3", "README", "last_reserved_ip.0", "lock", bootFile, "sub"}, names); diff != "" {
		t.Error(diff)
	}
}

func TestExhaustion(t *testing.T) {
	l := newLab(t, `"ranges":[[{"subnet":"10.1.2.0/30"},{"subnet":"10.1.3.0/30"}],[{"subnet":"fd00::/126"}]]`)
	l.mustGive("a", "10.1.2.2/30 fd00::2/126")
	l.mustGive("b", "10.1.3.2/30 fd00::3/126")
	before := l.files()
	a := l.call("ADD", "c", "")
	l.mustFail(a, plugin.CodeExhausted, "no IP addresses available in range set: 10.1.2.1-10.1.2.2,10.1.3.1-10.1.3.2")
	if want := "2 of 2 addresses are leased in " + l.dir; !strings.Contains(a.Detail, want) {
		t.Errorf("details %q lack %q", a.Detail, want)
	}
	l.ok(l.call("STATUS", "", ""))
	if diff := cmp.Diff(before, l.files()); diff != "" {
		t.Error(diff)
	}
}

// If a later set is exhausted, ADD releases the addresses from earlier ones.
func TestExhaustionOfLaterSet(t *testing.T) {
	l := newLab(t, `"ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"fd00::/126","rangeStart":"fd00::2","rangeEnd":"fd00::2"}]]`)
	l.mustGive("a", "10.1.2.2/24 fd00::2/126")
	l.mustFail(l.call("ADD", "b", ""), plugin.CodeExhausted, "fd00::2-fd00::2")
	if files := l.files(); files["10.1.2.3"] != "" || len(files) != 5 {
		t.Errorf("left %v", files)
	}
}

func TestRequested(t *testing.T) {
	ips := func(list ...string) string { return `"runtimeConfig":{"ips":["` + strings.Join(list, `","`) + `"]}` }
	l := newLab(t, `"ranges":[[{"subnet":"10.1.2.0/24","rangeEnd":"10.1.2.99"},{"subnet":"10.1.3.0/24"}],[{"subnet":"fd00::/64"}]]`)
	for _, c := range []struct {
		more, args, want string
	}{
		{ips("10.1.2.50"), "", "10.1.2.50/24 fd00::2/64"},
		{ips("10.1.3.50/8", "fd00::50"), "", "10.1.3.50/24 fd00::50/64"},
		{ips("fd00::51"), "IP=10.1.2.51", "10.1.2.51/24 fd00::51/64"},
		{`"args":{"cni":{"ips":["10.1.2.52"]}}`, "IP=10.1.2.53", "10.1.2.52/24 fd00::52/64"},
		{`"args":{"cni":{"ips":["10.1.2.54"]}},` + ips("10.1.2.55"), "IP=10.1.2.53", "10.1.2.55/24 fd00::53/64"},
	} {
		if a := l.call("ADD", "a", c.more, "CNI_ARGS="+c.args); a.addresses() != c.want {
			t.Errorf("%s %s: %+v, want %s", c.more, c.args, a, c.want)
		}
		l.ok(l.call("DEL", "a", ""))
	}
	if a := l.call("ADD", "owner", ips("10.1.2.60"), "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"); a.Code != 0 {
		t.Fatalf("got %+v", a)
	}
	before := l.files()
	for _, c := range []struct {
		more, says string
		code       uint
	}{
		{ips("10.1.2.60"), "requested IP address 10.1.2.60 is not available in range set 10.1.2.1-10.1.2.99,10.1.3.1-10.1.3.254: it is leased to pod shop/web-0, container owner, interface eth0", plugin.CodeAddressTaken},
		{ips("10.1.2.1"), "requested address 10.1.2.1 is the gateway of 10.1.2.0/24", plugin.CodeAddressTaken},
		{ips("10.1.2.100"), "failed to allocate all requested IPs: 10.1.2.100 is in no range of [10.1.2.1-10.1.2.99,10.1.3.1-10.1.3.254 fd00::", plugin.CodeConfig},
		{ips("10.1.2.70", "10.1.2.71"), "failed to allocate all requested IPs: 10.1.2.71 is a second address of range set 10.1.2.1-10.1.2.99,10.1.3.1-10.1.3.254", plugin.CodeConfig},
		{ips("10.1.2.70", "192.0.2.1", "fd01::1"), "failed to allocate all requested IPs: 192.0.2.1 is in no range of ",
			plugin.CodeConfig},
		{ips("192.0.2.1", "fd01::1"), ", fd01::1 is in no range of ", plugin.CodeConfig},
		{ips("10.1.2.70", "fd00::"), "fd00:: is in no range of ", plugin.CodeConfig},
		{ips("10.1.3.0"), "10.1.3.0 is in no range of ", plugin.CodeConfig},
		{ips("10.1.2.255"), "10.1.2.255 is in no range of ", plugin.CodeConfig},
	} {
		l.mustFail(l.call("ADD", "b", c.more), c.code, c.says)
		after := l.files()
		delete(after, "last_reserved_ip.0")
		delete(before, "last_reserved_ip.0")
		delete(after, "last_reserved_ip.1")
		delete(before, "last_reserved_ip.1")
		if diff := cmp.Diff(before, after); diff != "" {
			t.Errorf("%s left\n%s", c.more, diff)
		}
	}
}

// A /31 subnet has no broadcast address.
func TestRequestedInSmallSubnet(t *testing.T) {
	l := newLab(t, `"subnet":"10.1.2.0/31","rangeEnd":"10.1.2.0"`)
	l.mustFail(l.call("ADD", "a", `"runtimeConfig":{"ips":["10.1.2.1"]}`), plugin.CodeConfig, "10.1.2.1 is in no range")
}

func TestDNS(t *testing.T) {
	file := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(file, []byte("nameserver 192.0.2.3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l := newLab(t, one+`,"resolvConf":"`+file+`"`)
	if a := l.call("ADD", "a", ""); len(a.DNS.Nameservers) != 1 || a.DNS.Nameservers[0] != "192.0.2.3" {
		t.Errorf("got %+v", a)
	}
}

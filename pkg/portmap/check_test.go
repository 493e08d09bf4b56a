// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// TestCheckDetectsNFTables breaks one part of the nftables state at a time, which CHECK must detect (C-63, C-69).
func TestCheckDetectsNFTables(t *testing.T) {
	l := newLab(t)
	h := openHost(t)
	list := func(elsewhere bool) []ports.Port {
		c, err := parsed(withMappings(`{"hostPort":8080,"containerPort":80}`))
		if err != nil {
			t.Fatal(err)
		}
		pod := podAddresses(resultOf(t, prevResult("10.71.0.5/24")), "eth0")
		if elsewhere {
			pod = podAddresses(resultOf(t, prevResult("10.71.0.6/24")), "eth0")
		}
		return c.hostPorts(pod)
	}
	own := attachment.Key{Network: "net", ContainerID: "a", IfName: "eth0"}.Hash()
	del := func(owner string) error { return delHostPorts(h, ownedPorts{Owner: owner, Ports: list(false)}) }
	add := func(owner string, elsewhere bool) error {
		return addAll(h, ownedPorts{Owner: owner, Ports: list(elsewhere)})
	}
	for what, c := range map[string]struct {
		change func() error
		says   string
	}{
		"flushed": {kerneltest.FlushNFT, "the rules of nftables table inet podlace_hostport are missing"},
		"deleted": {func() error { return del(own) }, "hostPort tcp 8080: its entry"},
		"of another": {func() error {
			if err := del(own); err != nil {
				return err
			}
			return add("bbbbbbbbbbbbbbbb shop/b", false)
		}, "hostPort tcp 8080: now belongs to shop/b"},
		"to another pod": {func() error { return add(own, true) }, "hostPort tcp 8080: leads elsewhere"},
	} {
		if err := kerneltest.FlushNFT(); err != nil {
			t.Fatal(err)
		}
		l.OK(l.Call("ADD", "a"))
		l.OK(l.Call("CHECK", "a"))
		if err := c.change(); err != nil {
			t.Fatal(err)
		}
		if o := l.Call("CHECK", "a"); o.Failure.Code != plugin.CodeStateDiffers || !strings.Contains(o.Failure.Msg, c.says) {
			t.Errorf("%s: %s, want %q", what, o.Stdout, c.says)
		}
		l.OK(l.Call("DEL", "a"))
	}
}

// TestCheckDetectsIPTables deletes one iptables rule at a time, which CHECK must detect (C-63).
func TestCheckDetectsIPTables(t *testing.T) {
	kerneltest.Slow(t)
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := newLab(t)
	l.Conf = l.Conf.With("backend", "iptables")
	for _, c := range []struct {
		is4   bool
		chain string
		part  string
		says  string
	}{
		{true, "PREROUTING", dnatChain, "iptables chain PREROUTING: the jump to CNI-HOSTPORT-DNAT is missing"},
		{true, "OUTPUT", dnatChain, "iptables chain OUTPUT: the jump to CNI-HOSTPORT-DNAT is missing"},
		{false, "OUTPUT", dnatChain, "iptables chain OUTPUT"},
		{true, dnatChain, "8080", "the jump to " + l.chain("a") + " is missing"},
		{false, dnatChain, "5353", "the jump to " + l.chain("a") + " is missing"},
		{true, l.chain("a"), "--dport 8080 -j " + markChain, "hostPort tcp 8080: its rule in iptables chain"},
		{true, l.chain("a"), "--to-destination 10.71.0.5:80", "hostPort tcp 8080: its rule in iptables chain " + l.chain("a") + " is missing"},
		{false, l.chain("a"), "--to-destination [fd00:71::5]:53", "hostPort udp 5353: its rule"},
	} {
		l.OK(l.Call("ADD", "a"))
		l.OK(l.Call("CHECK", "a"))
		applyIPTables(t, c.is4, func(nat iptables.Table) (lines []string) {
			for _, rule := range nat.Rules(c.chain, c.part) {
				lines = append(lines, "-D"+strings.TrimPrefix(rule, "-A"))
			}
			return lines
		})
		if o := l.Call("CHECK", "a"); o.Failure.Code != plugin.CodeStateDiffers || !strings.Contains(o.Failure.Msg, c.says) {
			t.Errorf("%+v: %s", c, o.Stdout)
		}
		l.OK(l.Call("DEL", "a"))
	}
}

// CHECK fails if a rule of another program keeps packets from the hostPort rules (C-63).
func TestCheckDetectsAhead(t *testing.T) {
	kerneltest.Slow(t)
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := newLab(t)
	l.Conf = l.Conf.With("backend", "iptables")
	l.OK(l.Call("ADD", "a"))
	for rule, tells := range map[string]bool{
		"PREROUTING -j ACCEPT":                                    true,
		"PREROUTING -j DNAT --to-destination 10.71.0.9":           true,
		"OUTPUT -j RETURN":                                        true,
		dnatChain + " -p tcp -j RETURN":                           true,
		dnatChain + " -p tcp -j REDIRECT --to-ports 9":            true,
		l.chain("a") + " -j ACCEPT":                               true,
		"PREROUTING -s 192.0.2.1/32 -j ACCEPT":                    false,
		"PREROUTING -p tcp -m tcp --dport 22 -j RETURN":           false,
		"POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE": false,
		dnatChain + " -j LOG":                                     false,
	} {
		applyIPTables(t, true, func(iptables.Table) []string {
			chain, rest, _ := strings.Cut(rule, " ")
			return []string{"-I " + chain + " 1 " + rest}
		})
		if tells {
			l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, "a rule of another program comes before")
		} else {
			l.OK(l.Call("CHECK", "a"))
		}
		applyIPTables(t, true, func(iptables.Table) []string { return []string{"-D " + rule} })
		l.OK(l.Call("CHECK", "a"))
	}
	l.OK(l.Call("DEL", "a"))
}

// CHECK fails if hostPorts exist but their record is damaged or missing (F-21).
func TestCheckDetectsRecords(t *testing.T) {
	kerneltest.Slow(t)
	eachBackend(t, func(l testLab) {
		path := "/run/podlace/net/portmap-" + attachment.Key{Network: "net", ContainerID: "a", IfName: "eth0"}.Hash()
		for what, lose := range map[string]func() error{
			"the record of portmap is missing":     func() error { return os.Remove(path) },
			"the record of portmap cannot be read": func() error { return os.WriteFile(path, []byte(`{"format":1,`), 0o600) },
			"its format is 0":                      func() error { return os.WriteFile(path, []byte(`{}`), 0o600) },
		} {
			l.OK(l.Call("ADD", "a"))
			l.OK(l.Call("CHECK", "a"))
			if err := lose(); err != nil {
				l.Fatal(err)
			}
			l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, what)
			l.OK(l.Call("DEL", "a"))
		}
	})
}

// Elements that another program wrote into the hostPort maps are reported by CHECK, and replaced or deleted by GC.
func TestForeignElements(t *testing.T) {
	l := newLab(t)
	const table, own = "inet podlace_hostport ", "tcp . 8080"
	for what, c := range map[string]struct{ script, says string }{
		"to another pod": {"element=$(nft list map " + table + "ports4 | grep -o '" + own + " comment \"[^\"]*\"')\n" +
			"nft delete element " + table + "ports4 '{ " + own + " }'\n" +
			"nft add element " + table + "ports4 \"{ $element : 10.71.0.9 . 80 }\"", "hostPort tcp 8080: leads elsewhere"},
		"without owner": {"nft delete element " + table + "ports4 '{ " + own + " }'\n" +
			"nft add element " + table + "ports4 '{ " + own + " : 10.71.0.5 . 80 }'", "another program wrote its entry"},
		"of a port that no pod has": {"nft add element " + table + "ports4 '{ tcp . 9999 : 10.71.0.5 . 80 }'\n" +
			"nft add element " + table + "ports6 '{ tcp . 9999 : fd00::9 . 80 }'", ""},
	} {
		l.OK(l.Call("ADD", "a"))
		before := portElements(t)
		if out, err := exec.Command("sh", "-ec", c.script).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", what, err, out)
		}
		if c.says != "" {
			l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, c.says)
		}
		l.OK(l.Call("GC", "", "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}))
		if diff := cmp.Diff(before, portElements(t)); diff != "" {
			t.Errorf("%s: %s", what, diff)
		}
		l.OK(l.Call("CHECK", "a"))
		l.OK(l.Call("DEL", "a"))
	}
}

func natTable(t testing.TB, is4 bool) iptables.Table {
	t.Helper()
	table, err := iptables.Open(is4, true)
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	return table.NAT()
}

// applyIPTables changes the nat table of iptables.
func applyIPTables(t *testing.T, is4 bool, lines func(iptables.Table) []string) {
	t.Helper()
	table, err := iptables.Open(is4, true)
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	if err := table.Apply(lines(table.NAT())); err != nil {
		t.Fatal(err)
	}
}

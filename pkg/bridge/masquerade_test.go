// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func TestHint(t *testing.T) {
	err := withHint(fmt.Errorf("x: %w", &iptables.MissingProgram{Name: "iptables-save"}))
	if plugin.Code(err) != plugin.CodeKernelFeature ||
		plugin.Hint(err) != "install iptables, or use the nftables backend, which needs no program" {
		t.Errorf("code %d, hint %q", plugin.Code(err), plugin.Hint(err))
	}
	if err := withHint(nil); err != nil {
		t.Errorf("got %v", err)
	}
}

// masquerades returns an error unless the kernel masquerades these sources of the lab's network with these exceptions.
func (l lab) masquerades(sources, local string) error {
	h, err := kernel.Host()
	if err != nil {
		return err
	}
	defer h.Close()
	m := MasqueradeSets{Network: l.network()}
	for _, s := range strings.Fields(sources) {
		m.Sources = append(m.Sources, netip.MustParsePrefix(s))
	}
	for _, s := range strings.Fields(local) {
		m.Local = append(m.Local, netip.MustParsePrefix(s))
	}
	missing, err := missingMasquerade(h, m)
	if err == nil && !missing.empty() {
		err = fmt.Errorf("missing %v", missing)
	}
	return err
}

// TestMasqueradeEdited: the newest masquerade configuration applies to all pods of the network.
func TestMasqueradeEdited(t *testing.T) {
	l := newLab(t)
	a := l.add("a")
	if err := l.masquerades("10.60.0.0/24 fd00:60::/64", "10.60.0.0/24"); err != nil {
		t.Fatal(err)
	}
	edited := object{"v6": false, "nonMasqueradeCIDRs": []string{"10.0.0.0/8", "192.0.2.0/24", "fd00::/8"}}
	l.Fails(a.check("ipMasq", edited), 100, "the exception from masquerade for [10.0.0.0/8 192.0.2.0/24] is missing")
	b := l.other().add("b", "ipMasq", edited)
	l.OK(a.check("ipMasq", edited))
	l.OK(b.check("ipMasq", edited))
	for _, gone := range []string{"fd00:60::/64", "192.0.2.0/24"} {
		if l.masquerades(gone, "") == nil {
			t.Errorf("%s is masqueraded", gone)
		}
	}
	c := l.other().add("c")
	l.OK(c.check())
	if l.masquerades("", "192.0.2.0/24") == nil {
		t.Error("the exception stayed when it was taken out of the configuration")
	}
}

// foreignIPAM installs an external IPAM plugin in CNI_PATH, which assigns 10.61.0.N/24 to container N.
func (l lab) foreignIPAM() lab {
	l.Helper()
	script := `#!/bin/sh
[ "$CNI_COMMAND" = ADD ] && echo "{\"cniVersion\":\"1.1.0\",\"ips\":[{\"address\":\"10.61.0.$CNI_CONTAINERID/24\"}]}"
exit 0
`
	dir := l.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "foreign"), []byte(script), 0o700); err != nil {
		l.Fatal(err)
	}
	l.Env, l.Conf = map[string]string{"CNI_PATH": dir}, l.Conf.With("ipam", object{"type": "foreign"})
	return l
}

// TestMasqueradeFlushed: the next pod's ADD restores the masquerade of all pods after a flush, also for an external IPAM plugin.
func TestMasqueradeFlushed(t *testing.T) {
	l := bareLab(t, "name", "foreign", "bridge", "bt9", "isGateway", nil).foreignIPAM()
	l.add("5")
	l.other().add("6")
	if err := l.masquerades("10.61.0.5/32 10.61.0.6/32", "10.61.0.0/24"); err != nil {
		t.Fatal(err)
	}
	if l.masquerades("10.61.0.7/32", "") == nil {
		t.Error("an address that no pod has is masqueraded")
	}
	if err := kerneltest.FlushNFT(); err != nil {
		t.Fatal(err)
	}
	l.other().add("7")
	if err := l.masquerades("10.61.0.5/32 10.61.0.6/32 10.61.0.7/32", "10.61.0.0/24"); err != nil {
		t.Error(err)
	}
}

// TestMasqueradeIPTablesOneFamily: the iptables backend masquerades only the configured address families, and respects exceptions.
func TestMasqueradeIPTablesOneFamily(t *testing.T) {
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := newLab(t, "bridge", "bt6", "name", "tables", "ipMasqBackend", "iptables", "ipMasq",
		object{"v6": false, "nonMasqueradeCIDRs": []string{"192.0.2.0/24"}})
	a := l.add("a")
	l.OK(a.check())
	chain := masqueradeChain(key("tables", "a"))
	for is4, want := range map[bool]int{true: 1, false: 0} {
		nat := natTable(t, is4)
		if got := len(nat.Rules(chain, "192.0.2.0/24", "ACCEPT")); got != want || nat.HasChain(chain) != is4 {
			t.Errorf("IPv4 %t: %d exceptions, chain %t", is4, got, nat.HasChain(chain))
		}
	}
}

// TestMasqueradeEmptied: CHECK reports a chain that another program emptied while the sets still exist, and the next ADD restores it.
func TestMasqueradeEmptied(t *testing.T) {
	l := bareLab(t, "name", "emptied", "bridge", "btm1", "ipam", hostLocal("10.70.0.0/24"))
	t.Cleanup(func() { _ = onHost("btm1", netlink.LinkDel) })
	a := l.add("a")
	l.OK(a.check())
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	c.FlushTable(&nftables.Table{Name: "podlace_masquerade", Family: nftables.TableFamilyINet})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	l.Fails(a.check(), plugin.CodeStateDiffers, "the nftables rules that masquerade network emptied are missing")
	l.other().add("b")
	l.OK(a.check())
}

// TestMasqueradeBackendChanged: existing pods keep their masquerade after a change of the backend.
func TestMasqueradeBackendChanged(t *testing.T) {
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := bareLab(t, "name", "changedbackend", "bridge", "btm2", "ipam", hostLocal("10.71.0.0/24"))
	t.Cleanup(func() { _ = onHost("btm2", netlink.LinkDel) })
	a := l.add("a")
	b := l.other().add("b", "ipMasqBackend", "iptables")
	l.OK(a.check())
	l.OK(b.check("ipMasqBackend", "iptables"))
}

// TestMasqueradeEnds: "ipMasq": false removes all masquerade of the network, even if a part is already missing.
func TestMasqueradeEnds(t *testing.T) {
	l := bareLab(t, "name", "ends", "bridge", "btm3", "ipam", hostLocal("10.72.0.0/24"))
	t.Cleanup(func() { _ = onHost("btm3", netlink.LinkDel) })
	l.add("a")
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	table := &nftables.Table{Name: "podlace_masquerade", Family: nftables.TableFamilyINet}
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil || len(chains) == 0 {
		t.Fatalf("%d chains, %v", len(chains), err)
	}
	for _, chain := range chains {
		c.DelChain(chain)
	}
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	l.other().add("b", "ipMasq", false)
	if sets, err := c.GetSets(table); err != nil || len(sets) > 0 {
		t.Errorf("%d sets are left, %v", len(sets), err)
	}
}

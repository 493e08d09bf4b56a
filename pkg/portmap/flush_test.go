// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
)

// No elements are added to a table without rules: rules come together with the ports of all pods, since rules alone would look complete.
func TestFlushed(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	a := portList("tcp 80 10.1.0.5:80")
	for _, build := range []func() error{func() error { return nil }, installUnmarked} {
		kerneltest.Must(t, build())
		if ok, err := rulesIntact(h); ok || err != nil {
			t.Errorf("got %t, %v", ok, err)
		}
	}
	kerneltest.Must(t, addPorts(h, ownerA, "", a), checkPorts(h, ownerA, a))
	if ok, err := rulesIntact(h); !ok || err != nil {
		t.Errorf("got %t, %v", ok, err)
	}
}

// installUnmarked writes the rules and deletes their mark, as another program may.
func installUnmarked() error {
	if err := HostportSchema().Install(nil); err != nil {
		return err
	}
	t, err := nft.Open(nft.HostportTable)
	if err != nil {
		return err
	}
	defer t.Close()
	return t.Delete([]nft.Element{{Set: "schema", Key: nft.BigEndian(HostportSchema().Version)}})
}

// Restore adds missing elements, but leaves a port to an attachment that has taken it meanwhile.
func TestRestoreHostPorts(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	a, b := portList("tcp 80 10.1.0.5:80", "tcp 81 10.1.0.5:81"), portList("tcp 90 10.1.0.6:80")
	kerneltest.Must(t, addPorts(h, ownerA, "kt0", a), addPorts(h, ownerB, "", b))
	whole := portElements(t)
	all := []ownedPorts{{Owner: ownerA, Bridge: "kt0", Ports: a}, {Owner: ownerB, Ports: b}}
	c, err := nftables.New()
	kerneltest.Must(t, err)
	c.FlushTable(&nftables.Table{Name: nft.HostportTable, Family: nftables.TableFamilyINet})
	kerneltest.Must(t, c.Flush())
	if ok, err := rulesIntact(h); ok || err != nil {
		t.Error("the flush of the rules is not seen", err)
	}
	if err := checkPorts(h, ownerA, a); !isDifferent(err) || !strings.Contains(err.Error(), "are missing") {
		t.Error(err)
	}
	kerneltest.Must(t, delPorts(h, ownerB, b), restored(h, all), restored(h, all), checkPorts(h, ownerA, a), checkPorts(h, ownerB, b))
	if diff := cmp.Diff(whole, portElements(t)); diff != "" {
		t.Error(diff)
	}
	all = append(all, ownedPorts{Owner: "cccccccccccccccc x", Ports: portList("tcp 80 10.1.0.7:80", "tcp 99 10.1.0.7:80")})
	kerneltest.Must(t, restored(h, all), checkPorts(h, ownerA, a))
}

func restored(h *kernel.Node, all []ownedPorts) error {
	_, err := restoreTable(h, all)
	return err
}

// CHECK suggests 'podlace reload' if that can restore the missing part, but not if another pod may have taken the port.
func TestCheckHints(t *testing.T) {
	kerneltest.EmptyNFT(t)
	h := openHost(t)
	own := ownedPorts{Owner: ownerA, Bridge: "kt0", Ports: portList("tcp 80 10.1.0.5:80")}
	check := func() error { return checkHostPorts(h, own, otherOwners{"", map[string]otherOwner{}}) }
	if err := check(); !isDifferent(err) || plugin.Hint(err) != "another program flushed or changed them; 'podlace reload' brings back those of all pods" {
		t.Errorf("%v, hint %q", err, plugin.Hint(err))
	}
	kerneltest.Must(t, addAll(h, own), check())
	table, err := nft.Open(nft.HostportTable)
	kerneltest.Must(t, err)
	defer table.Close()
	for hint, e := range map[string]nft.Element{reloadHint: hairpin("kt0"), reloadHint + " ": ownerElement(ownerHash(ownerA)),
		"": own.elements()[1]} {
		kerneltest.Must(t, table.Delete([]nft.Element{e}))
		if err := check(); !isDifferent(err) || plugin.Hint(err) != strings.TrimSpace(hint) {
			t.Errorf("%s: %v, hint %q", e.Set, err, plugin.Hint(err))
		}
		kerneltest.Must(t, restored(h, []ownedPorts{own}), check())
	}
}

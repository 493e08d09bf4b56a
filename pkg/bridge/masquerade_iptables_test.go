// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/store"
)

// TestIPTablesFamilies: STATUS and GC restore the rules of the address families that were masqueraded at ADD, or of both if the record, as
// in older releases, does not say.
func TestIPTablesFamilies(t *testing.T) {
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := bareLab(t, "name", "families", "bridge", "btfam", "ipMasqBackend", "iptables", "ipMasq", object{"v6": false})
	t.Cleanup(func() { _ = onHost("btfam", netlink.LinkDel) })
	a := l.add("a")
	wants := func(after string, want6 bool) {
		t.Helper()
		chain := masqueradeChain(attachment.Key{Network: "families", ContainerID: "a", IfName: "eth0"})
		host := l.host()
		for is4, want := range map[bool]bool{true: true, false: want6} {
			if got := !iptables.LacksRules(&host.NFT, is4, chain); got != want {
				t.Errorf("after %s, IPv4 %t: masqueraded %t, want %t", after, is4, got, want)
			}
		}
	}
	wants("ADD", false)
	valid := []any{object{"containerID": "a", "ifname": "eth0"}}
	for verb, flush := range map[string]string{"STATUS": "iptables -t nat -F", "GC": "nft flush ruleset"} {
		l.run(flush)
		for range 2 {
			l.OK(l.Call(verb, "", "cni.dev/valid-attachments", valid))
			wants(verb, false)
		}
		l.OK(a.check())
	}
	path := filepath.Join(store.Root, "families", "bridge-"+key("families", "a").Hash())
	data, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, []byte(strings.Replace(string(data), `"noMasq6":true,`, "", 1)), 0o600)
	}
	if err != nil || !strings.Contains(string(data), `"noMasq6":true,`) || !json.Valid(data) {
		t.Fatalf("%v: %s", err, data)
	}
	l.run("nft flush ruleset")
	l.OK(l.Call("STATUS", ""))
	wants("STATUS with an older record", true)
}

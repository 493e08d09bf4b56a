// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"bytes"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/ports"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func testKey() attachment.Key {
	return attachment.Key{Network: "podlace", ContainerID: "0123456789abcdef", IfName: "eth0"}
}

func emptyNAT() iptables.Table { return iptables.Table{} }

// The chain of a pod has the same name as in the reference plugin.
func TestPodChain(t *testing.T) {
	for _, c := range []struct{ network, id, want string }{
		{"podlace", "0123456789abcdef", "CNI-DN-46d35c6a9e0ed75882799"},
		{"testNetName", "icee6giejonei6sohng6ahngee7laquohquee9shiGo7fohferakah3Feiyoolu2pei7ciPhoh7shaoX6vai3vuf0ahfaeng8yohb9ceu0daez5hashee8ooYai5wa3y",
			"CNI-DN-bfd599665540dd91d5d28"},
	} {
		if got := podChain(attachment.Key{Network: c.network, ContainerID: c.id, IfName: "eth0"}); got != c.want || len(got) != 28 {
			t.Errorf("%s, want %s", got, c.want)
		}
	}
}

// generatedLines returns the iptables-restore lines of one ADD for both address families.
func generatedLines(t *testing.T, keys string, nat4 iptables.Table) string {
	t.Helper()
	cfg, err := parsed(keys)
	if err != nil {
		t.Fatal(err)
	}
	pod := []netip.Prefix{netip.MustParsePrefix("10.1.0.5/24"), netip.MustParsePrefix("fd00::5/64")}
	list := cfg.hostPorts(pod)
	var b bytes.Buffer
	for i, p := range pod {
		own, nat := ports.OfFamily(list, p.Addr().Is4()), nat4
		fmt.Fprintf(&b, "# IPv%d\n", 4+2*i)
		if len(own) == 0 {
			continue
		}
		of := *cfg.forPod(pod)
		for _, lines := range [][]string{sharedLines(nat, cfg.SNAT, of), podLines(testKey(), of, own, p), jumpLines(nat, testKey(), of, own)} {
			fmt.Fprintln(&b, strings.Join(lines, "\n"))
		}
	}
	return b.String()
}

// TestLines compares the generated rules with golden files, which -update rewrites.
func TestLines(t *testing.T) {
	tcp := func(n int) string {
		var list []string
		for i := range n {
			list = append(list, fmt.Sprintf(`{"hostPort":%d,"containerPort":80}`, 8000+i))
		}
		return withMappings(list...)
	}
	for name, keys := range map[string]string{
		"plain": `"backend":"iptables",` + withMappings(`{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`,
			`{"hostPort":5353,"containerPort":53,"protocol":"udp"}`),
		"hostip": `"backend":"iptables",` + withMappings(`{"hostPort":8080,"containerPort":80,"hostIP":"192.0.2.1"}`,
			`{"hostPort":8081,"containerPort":81,"hostIP":"2001:db8::1"}`, `{"hostPort":8082,"containerPort":82,"hostIP":"0.0.0.0"}`),
		"nosnat":     `"backend":"iptables","snat":false,` + tcp(1),
		"masqall":    `"backend":"iptables","masqAll":true,` + tcp(1),
		"markbit":    `"markMasqBit":5,` + tcp(1),
		"external":   `"externalSetMarkChain":"KUBE-MARK-MASQ",` + tcp(1),
		"conditions": `"conditionsV4":["!","-s","192.0.2.0/24"],"conditionsV6":["-m","mark","--mark","0x1"],` + tcp(1),
		"multiport":  `"backend":"iptables",` + tcp(31),
	} {
		path := filepath.Join("testdata", name+".golden")
		got := generatedLines(t, keys, emptyNAT())
		if *update {
			if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
			t.Errorf("pkg/portmap/%s differs from the rules: correct them, or run: go test ./pkg/portmap -run '^TestLines$' -update\n(-file +rules)\n%s",
				path, diff)
		}
	}
}

// A second ADD replaces the pod's stale rules without writing the shared ones again.
func TestLinesAgain(t *testing.T) {
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := newLab(t)
	l.Conf = l.Conf.With("backend", "iptables")
	l.OK(l.Call("ADD", "a"))
	saved := func() string {
		nat := natTable(t, true)
		var rules []string
		for _, chain := range []string{"PREROUTING", "OUTPUT", "POSTROUTING", dnatChain, markChain, masqChain, l.chain("a")} {
			rules = append(rules, nat.Rules(chain)...)
		}
		return strings.Join(rules, "\n")
	}
	once := saved()
	if strings.Count(once, "\n") != 12 {
		t.Errorf("got\n%s", once)
	}
	for range 2 {
		l.OK(l.Call("ADD", "a"))
		if diff := cmp.Diff(once, saved()); diff != "" {
			t.Error(diff)
		}
	}
	l.OK(l.Call("DEL", "a"))
}

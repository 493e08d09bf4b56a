// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// runShell runs commands on the node. HOST stands for the pod's host-side veth, and NET for the hash that ends the names of the network's
// chains and sets.
func (h attachedPod) runShell(script string) error {
	words := strings.NewReplacer("HOST", h.hostVeth(), "NET", h.networkHash())
	if out, err := exec.Command("sh", "-ec", words.Replace(script)).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", script, err, out)
	}
	return nil
}

func (h attachedPod) networkHash() string {
	out, err := exec.Command("nft", "list", "table", "inet", "podlace_masquerade").CombinedOutput()
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, `"network `+h.confs[0]["name"].(string)+`"`) {
			_, rest, _ := strings.Cut(line, "@pods4-")
			return rest[:16]
		}
	}
	return ""
}

// shellBreakages returns one breakage for each script, which CHECK of the plugin with this index must report.
func shellBreakages(plugin int, scripts map[string]string) map[string]breakage {
	all := map[string]breakage{}
	for title, script := range scripts {
		all[title] = breakage{plugin, func(h attachedPod) error { return h.runShell(script) }}
	}
	return all
}

// takesAll is a tc filter for every frame, in a form that every kernel with bandwidth limits supports. droppingFilter redirects all frames
// to a link and deletes it, so that they are dropped.
const (
	takesAll       = "pref 1 protocol all u32 match u32 0 0 action mirred egress redirect dev "
	droppingFilter = "ip link add gone0 type veth peer name gone1\n%s\nip link del gone0"
)

func filterBreakages() map[string]breakage {
	return shellBreakages(2, map[string]string{
		"C-64 filter ahead of the redirect":     "tc filter add dev HOST ingress " + takesAll + "lo",
		"C-64 filter ahead of the token bucket": "tc filter add dev HOST egress " + takesAll + "lo",
	})
}

// TestCheckTellsUnlimited: CHECK of bridge reports tc filters that drop the traffic of a pod without limits.
func TestCheckTellsUnlimited(t *testing.T) {
	needTools(t, "tc", "ip")
	n := newNode(t, "unlimited", 147, "nftables")
	n.confs = n.confs[:2]
	filter := func(qdisc, side string) string {
		return fmt.Sprintf("tc qdisc add dev HOST "+qdisc+"\n"+droppingFilter, "tc filter add dev HOST "+side+" "+takesAll+"gone0")
	}
	for title, b := range harness.InOrder(shellBreakages(0, map[string]string{
		"C-61 clsact, ingress filter drops": filter("clsact", "ingress"),
		"C-61 clsact, egress filter drops":  filter("clsact", "egress"),
		"C-61 ingress qdisc, filter drops":  filter("ingress", "parent ffff:"),
	})) {
		t.Run(title, func(t *testing.T) {
			n := n.inSubtest(t)
			h := n.attach("unlimited")
			h.checkChain()
			if err := b.change(h); err != nil {
				t.Fatal(err)
			}
			h.callOf(0, "CHECK").Run(t).Refused(t, codeStateDiffers)
			h.delChain()
		})
	}
}

func needTools(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		if _, err := exec.LookPath(name); err != nil {
			t.Skipf("SKIPPED: %s is not installed", name)
		}
	}
}

// tableOf is one of Podlace's nftables tables: its name, a base chain with type, hook and priority, and the plugin whose CHECK reports
// damage.

type tableOf struct {
	plugin            int
	name, chain, base string
}

func tablesOfChain() []tableOf {
	return []tableOf{
		{0, "inet podlace_masquerade", "network-NET", "type nat hook postrouting priority "},
		{0, "bridge podlace_guard", "prerouting", "type filter hook prerouting priority "},
		{1, "inet podlace_hostport", "prerouting", "type nat hook prerouting priority "},
		{1, "inet podlace_loopback", "prerouting", "type filter hook prerouting priority "},
	}
}

// rewriteScript returns a script that recreates a chain after sed(1) has edited its rules.
func (x tableOf) rewriteScript(sed string) string {
	return fmt.Sprintf("old=$(nft list table %[1]s)\nnft flush chain %[1]s %[2]s\nnft delete chain %[1]s %[2]s\n"+
		"{ echo \"$old\" | sed -n '/^table/p;/chain %[2]s {/,/^\t}/p' | sed '%[3]s'; echo '}'; } | nft -f -", x.name, x.chain, sed)
}

func (x tableOf) breakages() map[string]string {
	chain := x.name + " " + x.chain
	return map[string]string{
		"dormant":            "nft add table " + x.name + " '{ flags dormant; }'",
		"foreign rule ahead": "nft insert rule " + chain + " accept",
		"foreign rule drops": "nft insert rule " + chain + " counter drop",
		"rule for another": "nft delete rule " + chain + " handle $(nft -a list chain " + chain + " | sed -n 's/.*handle //;4p')\n" +
			"nft insert rule " + chain + " return",
		"chain flushed":    "nft flush chain " + chain,
		"chain deleted":    "nft flush chain " + chain + "\nnft delete chain " + chain,
		"policy drop":      "nft chain " + chain + " '{ policy drop; }'",
		"priority changed": x.rewriteScript("s/priority [^;]*/priority 250/"),
		"foreign chain":    "nft add chain " + x.name + " foreign '{ " + x.base + "-150; }'\nnft add rule " + x.name + " foreign accept",
	}
}

// CHECK reports each change that another program might make to Podlace's tables. STATUS, GC and `podlace reload`, which take turns, restore
// the table.
func TestCheckTellsTables(t *testing.T) {
	needTools(t, "nft")
	n := newNode(t, "tables", 148, "nftables")
	n = n.withKeys(0, "antiSpoof", true)
	turn := 0
	for _, x := range tablesOfChain() {
		for title, script := range harness.InOrder(x.breakages()) {
			if x.plugin == 0 && title == "foreign chain" && x.chain != "prerouting" {
				continue // other networks have chains in the same table
			}
			t.Run("C-63 "+x.name+": "+title, func(t *testing.T) {
				n := n.inSubtest(t)
				h := n.attach("tables")
				defer h.delChain()
				h.checkChain()
				restores := h.restoreCalls(x.plugin)
				turn++
				for _, verb := range harness.OneOf([]string{"STATUS", "GC", "reload"}, turn) {
					if err := h.runShell(script); err != nil {
						t.Fatal(err)
					}
					h.callOf(x.plugin, "CHECK").Run(t).Refused(t, codeStateDiffers)
					restores[verb]()
					t.Log(verb)
					h.checkChain()
				}
			})
		}
	}
}

// restoreCalls returns the commands that restore a plugin's missing rules.
func (h attachedPod) restoreCalls(plugin int) map[string]func() {
	run := func(verb string, pairs ...any) func() {
		return func() {
			h.Helper()
			c := editedKeys(append(pairs, "prevResult", nil)...)(h.callOf(plugin, verb))
			c.Run(h.T).OK(h.T)
		}
	}
	return map[string]func(){
		"STATUS": run("STATUS"),
		"GC":     run("GC", "cni.dev/valid-attachments", []any{object{"containerID": h.pod.Name, "ifname": h.ifname}}),
		"reload": func() {
			if out, err := exec.Command(filepath.Join(harness.BinDir(), "podlace"), "reload").CombinedOutput(); err != nil {
				h.Fatalf("reload: %v: %s", err, out)
			}
		},
	}
}

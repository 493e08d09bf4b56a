// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"
	"os/exec"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/podlace/podlace/pkg/kernel/kerneltest"
)

// addChain creates a chain with rules that only count packets. If the argument "hook" is nil, addChain sets no policy, because a chain
// without a hook cannot have a policy.
func addChain(t *testing.T, family nftables.TableFamily, name string, hook *nftables.ChainHook, policy nftables.ChainPolicy, rules int) {
	t.Helper()
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	chain := &nftables.Chain{Table: c.AddTable(&nftables.Table{Name: "filter", Family: family}), Name: name}
	if hook != nil {
		chain.Hooknum, chain.Type, chain.Priority, chain.Policy = hook, nftables.ChainTypeFilter, nftables.ChainPriorityFilter, &policy
	}
	c.AddChain(chain)
	for range rules {
		c.AddRule(&nftables.Rule{Table: chain.Table, Chain: chain, Exprs: []expr.Any{&expr.Counter{}}})
	}
	kerneltest.Must(t, c.Flush())
}

// TestForwardDrops checks that forwardDrops returns only the forward chains with policy drop.
func TestForwardDrops(t *testing.T) {
	h := openHost(t)
	const (
		v4, v6, both = nftables.TableFamilyIPv4, nftables.TableFamilyIPv6, nftables.TableFamilyINet
		drop, accept = nftables.ChainPolicyDrop, nftables.ChainPolicyAccept
	)
	forward := nftables.ChainHookForward
	for title, c := range map[string]struct {
		make func(t *testing.T)
		want []chainName
	}{
		"no table":           {make: func(*testing.T) {}},
		"no such chain":      {make: func(t *testing.T) { addChain(t, v4, "INPUT", nftables.ChainHookInput, drop, 0) }},
		"accept":             {make: func(t *testing.T) { addChain(t, v4, "FORWARD", forward, accept, 1) }},
		"no hook, no policy": {make: func(t *testing.T) { addChain(t, v4, "FORWARD", nil, drop, 1) }},
		"drop":               {func(t *testing.T) { addChain(t, v4, "FORWARD", forward, drop, 50) }, []chainName{{"ip", "filter", "FORWARD"}}},
		"drop of IPv6":       {func(t *testing.T) { addChain(t, v6, "FORWARD", forward, drop, 1) }, []chainName{{"ip6", "filter", "FORWARD"}}},
		"drop of nftables": {func(t *testing.T) { addChain(t, both, "forward", forward, drop, 1) },
			[]chainName{{"inet", "filter", "forward"}}},
		"iptables -P FORWARD":  {func(t *testing.T) { policyByTool(t, "iptables") }, []chainName{{"ip", "filter", "FORWARD"}}},
		"ip6tables -P FORWARD": {func(t *testing.T) { policyByTool(t, "ip6tables") }, []chainName{{"ip6", "filter", "FORWARD"}}},
	} {
		t.Run(title, func(t *testing.T) {
			kerneltest.EmptyNFT(t)
			t.Cleanup(func() { kerneltest.EmptyNFT(t) })
			c.make(t)
			got, err := forwardDrops(h)
			if diff := cmp.Diff(c.want, got); err != nil || diff != "" {
				t.Errorf("%v\n%s", err, diff)
			}
		})
	}
}

func policyByTool(t *testing.T, program string) {
	t.Helper()
	if out, err := exec.Command("/usr/sbin/"+program, "-V").Output(); err != nil || !nftVariant(out) {
		t.Skipf("SKIPPED: %s is not of nf_tables: %s %v", program, out, err)
	}
	if out, err := exec.Command("/usr/sbin/"+program, "-P", "FORWARD", "DROP").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// nftVariant parses a version text such as "iptables v1.8.9 (nf_tables)" and reports whether iptables is the nft variant.
func nftVariant(version []byte) bool {
	var name, number, variant string
	_, err := fmt.Sscan(string(version), &name, &number, &variant)
	return err == nil && variant == "(nf_tables)"
}

func TestChainCovers(t *testing.T) {
	for c, want := range map[chainName][2]bool{filterChain(true, "x"): {true, false}, filterChain(false, "x"): {false, true},
		{"inet", "filter", "x"}: {true, true}} {
		if got := [2]bool{c.Covers(true), c.Covers(false)}; got != want {
			t.Errorf("%s: %v", c, got)
		}
	}
}

func TestHasChain(t *testing.T) {
	kerneltest.EmptyNFT(t)
	t.Cleanup(func() { kerneltest.EmptyNFT(t) })
	h := openHost(t)
	addChain(t, nftables.TableFamilyIPv4, "DOCKER-USER", nil, 0, 0)
	for c, want := range map[chainName]bool{filterChain(true, "DOCKER-USER"): true, filterChain(false, "DOCKER-USER"): false,
		filterChain(true, "DOCKER"): false, {"inet", "filter", "DOCKER-USER"}: false} {
		if got, err := hasChain(h, c); err != nil || got != want {
			t.Errorf("%s: %t, %v", c, got, err)
		}
	}
}

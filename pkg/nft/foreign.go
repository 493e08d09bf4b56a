// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
)

// DroppingChain is a base chain of another program at the forward hook that drops every packet which no rule accepts.
type DroppingChain struct {
	Family string // as in nft(8)
	Table  string
	Chain  string
	Reason string           // why unmatched packets are dropped, as "has the policy drop"
	Others []string         // names of the table's chains without a hook
	rules  []*nftables.Rule // of the chain and of those that it calls
}

// String returns family, table and name of the chain, as in nft(8).
func (d DroppingChain) String() string { return fmt.Sprintf("%s %s %s", d.Family, d.Table, d.Chain) }

// MayAccept reports whether a rule of the chain compares an interface name with that of the link or a prefix of it, and does not drop the
// packets that match.
func (d DroppingChain) MayAccept(link string) bool {
	return slices.ContainsFunc(d.rules, func(r *nftables.Rule) bool {
		return slices.ContainsFunc(r.Exprs, func(e expr.Any) bool {
			cmp, ok := e.(*expr.Cmp)
			if !ok || cmp.Op == expr.CmpOpEq && slices.ContainsFunc(r.Exprs, drops) {
				return false
			}
			name := bytes.TrimRight(cmp.Data, "\x00")
			return len(name) > 2 && (string(name) == link || len(cmp.Data) < 16 && bytes.HasPrefix([]byte(link), name))
		})
	})
}

// DroppingChains returns the base chains of other programs at the forward hook that drop unmatched packets: those with the policy drop, or
// with a last rule that drops everything. It reads the rules of all base chains there, and for each one found those of the chains without a
// hook in its table.
func DroppingChains() (found []DroppingChain, err error) {
	c, err := New()
	if err != nil {
		return nil, err
	}
	chains, err := c.ListChains()
	if err := IgnoreUnsupported(err); err != nil {
		return nil, fmt.Errorf("nft list chains: %w", err)
	}
	families := map[nftables.TableFamily]string{nftables.TableFamilyINet: "inet", nftables.TableFamilyIPv4: "ip",
		nftables.TableFamilyIPv6: "ip6"}
	for _, chain := range chains {
		family := families[chain.Table.Family]
		if family == "" || chain.Hooknum == nil || *chain.Hooknum != *nftables.ChainHookForward || isOwn(chain.Table) {
			continue
		}
		d := DroppingChain{Family: family, Table: chain.Table.Name, Chain: chain.Name}
		if err := d.read(c, chain, chains); err != nil {
			return nil, fmt.Errorf("nft list chain %s: %w", d, err)
		}
		if d.Reason != "" {
			found = append(found, d)
		}
	}
	return found, nil
}

// read reads the rules of the chain. If it drops unmatched packets, read also sets d.Reason and adds the rules of the chains without a hook
// in the same table.
func (d *DroppingChain) read(c *nftables.Conn, chain *nftables.Chain, chains []*nftables.Chain) (err error) {
	if d.rules, err = c.GetRules(chain.Table, chain); err != nil {
		return err
	}
	switch {
	case chain.Policy != nil && *chain.Policy == nftables.ChainPolicyDrop:
		d.Reason = "has the policy drop"
	case dropsRest(d.rules):
		d.Reason = "ends with a rule that drops all other packets"
	default:
		return nil
	}
	for _, other := range chains {
		if other.Table.Name != d.Table || other.Table.Family != chain.Table.Family || other.Hooknum != nil {
			continue
		}
		rules, err := c.GetRules(other.Table, other)
		if err != nil {
			return err
		}
		d.rules, d.Others = append(d.rules, rules...), append(d.Others, other.Name)
	}
	return nil
}

// dropsRest reports whether the last rule drops or rejects packets without any condition.
func dropsRest(rules []*nftables.Rule) bool {
	if len(rules) == 0 {
		return false
	}
	last := slices.DeleteFunc(slices.Clone(rules[len(rules)-1].Exprs), func(e expr.Any) bool {
		_, counter := e.(*expr.Counter)
		_, log := e.(*expr.Log)
		return counter || log
	})
	return len(last) == 1 && drops(last[0])
}

// drops reports whether an expression drops or rejects packets.
func drops(e expr.Any) bool {
	switch e := e.(type) {
	case *expr.Reject:
		return true
	case *expr.Verdict:
		return e.Kind == expr.VerdictDrop
	case *expr.Target: // of iptables
		return e.Name == "REJECT"
	}
	return false
}

func isOwn(table *nftables.Table) bool {
	return slices.ContainsFunc(Tables(), func(t Table) bool { return t.matches(table) })
}

// IPTables returns the existing tables with names that iptables-nft uses for IPv4, such as "ip filter".
func IPTables() (names []string, err error) {
	c, err := New()
	if err != nil {
		return nil, err
	}
	tables, err := c.ListTables()
	for _, t := range tables {
		if t.Family == nftables.TableFamilyIPv4 && slices.Contains([]string{"filter", "nat", "mangle", "raw", "security"}, t.Name) {
			names = append(names, "ip "+t.Name)
		}
	}
	return names, IgnoreUnsupported(err)
}

// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// ruleset writes a table of rules that are made once a node.
type ruleset struct {
	c     *nftables.Conn
	table *nftables.Table
	rules *int // how many were written
}

func newRuleset(c *nftables.Conn, table *nftables.Table) ruleset {
	return ruleset{c, c.AddTable(table), new(int)}
}

// schemaSet is a set whose element is the version of the table, so that a newer plugin sees that it has to write the rules anew. The
// version is raised with every change of them. How many there are stands beside it, so that a flush is seen.
const schemaSet = "schema"

// mark comes after the rules.
func (r ruleset) mark(version uint16) error {
	mark, err := r.unmark()
	if err != nil {
		return err
	}
	return r.c.SetAddElements(mark, []nftables.SetElement{{Key: be16(version), Comment: markText(*r.rules)}})
}

// unmark makes the set of the mark, empty.
func (r ruleset) unmark() (*nftables.Set, error) {
	mark := &nftables.Set{Table: r.table, Name: schemaSet, KeyType: nftables.TypeInetService}
	if err := r.c.AddSet(mark, nil); err != nil {
		return nil, err
	}
	r.c.FlushSet(mark)
	return mark, nil
}

func markText(rules int) string { return fmt.Sprintf("version of the %d rules", rules) }

// marked tells whether the table has the rules of this version, all of them.
func (t *nft) marked(version uint16) (bool, error) {
	mark, ok, err := t.get(element{Set: schemaSet, Key: be16(version)})
	if err != nil || !ok {
		return false, err
	}
	n, err := t.countRules()
	return mark.Comment == markText(n), err
}

func (r ruleset) chain(name string, hook *nftables.ChainHook, priority int, kind nftables.ChainType) *nftables.Chain {
	chain := &nftables.Chain{Table: r.table, Name: name}
	if hook != nil {
		policy := nftables.ChainPolicyAccept
		chain.Hooknum, chain.Type, chain.Policy = hook, kind, &policy
		chain.Priority = nftables.ChainPriorityRef(nftables.ChainPriority(priority))
	}
	r.c.AddChain(chain)
	r.c.FlushChain(chain)
	return chain
}

func (r ruleset) rule(chain *nftables.Chain, exprs ...expr.Any) {
	*r.rules++
	r.c.AddRule(&nftables.Rule{Table: r.table, Chain: chain, Exprs: exprs})
}

func (r ruleset) set(name string, value []nftables.SetDatatype, key ...nftables.SetDatatype) (*nftables.Set, error) {
	keyType, err := nftables.ConcatSetType(key...)
	if err != nil {
		return nil, err
	}
	s := &nftables.Set{Table: r.table, Name: name, KeyType: keyType}
	if len(key) == 1 && key[0].Name == nftables.TypeIFName.Name {
		s.KeyByteOrder = binaryutil.NativeEndian // nft(8) prints names of this order alone
	}
	if value != nil {
		s.IsMap = true
		if s.DataType, err = nftables.ConcatSetType(value...); err != nil {
			return nil, err
		}
	}
	return s, r.c.AddSet(s, nil)
}

// intervals is set for keys that are intervals in their last field.
func (r ruleset) intervals(name string, value nftables.SetDatatype, key ...nftables.SetDatatype) (*nftables.Set, error) {
	keyType, err := nftables.ConcatSetType(key...)
	if err != nil {
		return nil, err
	}
	s := &nftables.Set{Table: r.table, Name: name, KeyType: keyType, Interval: true, Concatenation: true}
	if value.Name != "" {
		s.IsMap, s.DataType = true, value
	}
	return s, r.c.AddSet(s, nil)
}

func network(register, offset, length uint32) expr.Any {
	return &expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length}
}

// port loads the destination port, which tcp, udp and sctp have at the same place.
func port(register uint32) expr.Any {
	return &expr.Payload{DestRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
}

func find(set *nftables.Set) expr.Any {
	return &expr.Lookup{SourceRegister: 1, DestRegister: 1, IsDestRegSet: true, SetName: set.Name, SetID: set.ID}
}

// equal compares what was loaded into register 1.
func equal(data []byte) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data}
}

func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

func join(parts ...[]expr.Any) []expr.Any {
	var all []expr.Any
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

// rulesOf counts the rules of chains; those of a missing chain are none.
func rulesOf(table *nftables.Table, chains ...string) ([]int, error) {
	found := make([]int, len(chains))
	conn, err := newNFT(nftables.AsLasting())
	if err != nil {
		return found, err
	}
	defer func() { _ = conn.CloseLasting() }()
	for i, chain := range chains {
		rules, err := conn.GetRules(table, &nftables.Chain{Name: chain, Table: table})
		if err := fault.Ignore(err, unix.ENOENT); err != nil {
			return found, err
		}
		found[i] = len(rules)
	}
	return found, nil
}

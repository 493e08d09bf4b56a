// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"encoding/binary"
	"sync/atomic"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
)

// Ruleset builds a table with static chains, sets and rules.
type Ruleset struct {
	C     *nftables.Conn
	Table *nftables.Table
	made  map[string]*layout // chains by name
	sets  map[string]*nftables.Set
}

// NewRuleset adds a table to the next transaction of c, and returns its Ruleset, which is empty.
func NewRuleset(c *nftables.Conn, table *nftables.Table) Ruleset {
	return Ruleset{c, c.AddTable(table), map[string]*layout{}, map[string]*nftables.Set{}}
}

// Chain adds an empty chain, which is a base chain unless hook is nil.
func (r Ruleset) Chain(name string, hook *nftables.ChainHook, priority int, kind nftables.ChainType) *nftables.Chain {
	chain := &nftables.Chain{Table: r.Table, Name: name}
	r.made[name] = &layout{}
	if hook != nil {
		policy := nftables.ChainPolicyAccept
		chain.Hooknum, chain.Type, chain.Policy = hook, kind, &policy
		chain.Priority = nftables.ChainPriorityRef(nftables.ChainPriority(priority))
		r.made[name].chain = Chain{Base: true, Policy: uint32(policy), Hook: uint32(*hook), Priority: int32(priority), Type: string(kind)}
	}
	r.C.AddChain(chain)
	r.C.FlushChain(chain)
	return chain
}

// Rule appends a rule without a comment to a chain.
func (r Ruleset) Rule(chain *nftables.Chain, exprs ...expr.Any) { r.add(chain, nil, exprs) }

func (r Ruleset) add(chain *nftables.Chain, data []byte, exprs []expr.Any) {
	r.made[chain.Name].append(byte(r.Table.Family), exprs)
	r.C.AddRule(&nftables.Rule{Table: r.Table, Chain: chain, Exprs: exprs, UserData: data})
}

// Commented appends a rule with a comment to a chain.
func (r Ruleset) Commented(chain *nftables.Chain, comment string, exprs []expr.Any) {
	r.add(chain, userdata.AppendString(nil, userdata.TypeComment, comment), exprs)
}

// Set adds an nftables set, or a map if value is not nil.
func (r Ruleset) Set(name string, value []nftables.SetDatatype, key ...nftables.SetDatatype) (*nftables.Set, error) {
	keyType, err := nftables.ConcatSetType(key...)
	if err != nil {
		return nil, err
	}
	s := &nftables.Set{Table: r.Table, Name: name, KeyType: keyType}
	if len(key) == 1 && key[0].Name == nftables.TypeIFName.Name {
		s.KeyByteOrder = binaryutil.NativeEndian // nft(8) prints names only in this byte order
	}
	if value != nil {
		s.IsMap = true
		if s.DataType, err = nftables.ConcatSetType(value...); err != nil {
			return nil, err
		}
	}
	return s, r.AddSet(s)
}

// setID is the number of the newest set. Package nftables would number them itself, but with a counter that has no lock.
var setID atomic.Uint32

// Named returns a set of the ruleset.
func (r Ruleset) Named(set string) *nftables.Set { return r.sets[set] }

// AddSet adds a set to the table. If it exists in the kernel, its elements stay.
func (r Ruleset) AddSet(s *nftables.Set) error {
	s.ID = setID.Add(1)
	r.sets[s.Name] = s
	return r.C.AddSet(s, nil)
}

// Intervals adds a set or map whose last key field is an interval.
func (r Ruleset) Intervals(name string, value nftables.SetDatatype, key ...nftables.SetDatatype) (*nftables.Set, error) {
	keyType, err := nftables.ConcatSetType(key...)
	if err != nil {
		return nil, err
	}
	s := &nftables.Set{Table: r.Table, Name: name, KeyType: keyType, Interval: true, Concatenation: true}
	if value.Name != "" {
		s.IsMap, s.DataType = true, value
	}
	return s, r.AddSet(s)
}

// Network returns an expression that loads a field of the network header into a register.
func Network(register, offset, length uint32) expr.Any {
	return &expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length}
}

// DestinationPort returns an expression that loads the destination port, which has the same offset in TCP, UDP and SCTP, into a register.
func DestinationPort(register uint32) expr.Any {
	return &expr.Payload{DestRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
}

// Lookup returns an expression that replaces the value of register 1 by what a map contains for it.
func Lookup(set *nftables.Set) expr.Any {
	return &expr.Lookup{SourceRegister: 1, DestRegister: 1, IsDestRegSet: true, SetName: set.Name, SetID: set.ID}
}

// Equal returns an expression that matches if register 1 equals data.
func Equal(data []byte) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data}
}

// Translated returns expressions that match packets of a connection with destination NAT (IPS_DST_NAT, bit 5 of the conntrack status).
func Translated() []expr.Any {
	const dstNAT = 1 << 5
	return matchConnection(expr.CtKeySTATUS, dstNAT)
}

// Invalid returns expressions that match packets of no connection, such as a TCP reset of an unknown one, which NAT ignores.
func Invalid() []expr.Any {
	return matchConnection(expr.CtKeySTATE, expr.CtStateBitINVALID)
}

func matchConnection(key expr.CtKey, bit uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: key, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: Native(bit), Xor: Native(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: Native(0)},
	}
}

// Drop returns the verdict that drops the packet.
func Drop() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }

// Accept returns the verdict that accepts the packet.
func Accept() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}} }

// BigEndian encodes a port or a version number in network byte order.
func BigEndian(v uint16) []byte { return binary.BigEndian.AppendUint16(nil, v) }

// Native encodes a number in host byte order.
func Native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	mdl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// layout is the expected state of a chain.
type layout struct {
	chain Chain
	rules []string // shapes of the rules
}

func (l *layout) append(family byte, exprs []expr.Any) {
	if l == nil { // the chain is another program's
		return
	}
	var shape string
	for _, e := range exprs {
		data, err := expr.Marshal(family, e)
		if err != nil {
			data = nil // AddRule reports it
		}
		shape += shapeOf(data)
	}
	l.rules = append(l.rules, shape)
}

// Drift compares the table's chains with those that build creates. It returns "" if they are equal, else the first difference, such as "are
// missing", which continues a sentence that begins with "the rules of table X". It reads only the rules of these chains, so its running
// time does not depend on the number of pods.
func (t *Handle) Drift(build func(Ruleset) error) (string, error) {
	r := NewRuleset(&nftables.Conn{}, TableOf(t.Table).Netlink()) // never sent
	if err := build(r); err != nil {
		return "", err
	}
	if dormant, err := t.isDormant(); err != nil {
		return "", err
	} else if dormant {
		return "do nothing: the table is dormant", nil
	}
	for _, name := range slices.Sorted(maps.Keys(r.made)) {
		at, want := Place{t.family, t.Table, name}, r.made[name]
		chain, ok, err := t.Chain(at)
		if err != nil {
			return "", err
		}
		chain.Uses = 0
		if ok && chain != want.chain {
			return fmt.Sprintf("were changed: chain %s has another hook, priority or policy", name), nil
		}
		list, err := t.Rules(at)
		if err != nil {
			return "", err
		}
		var has []string
		for _, rule := range list {
			has = append(has, rule.shape)
		}
		switch {
		case len(has) < len(want.rules):
			return "are missing", nil
		case !slices.Equal(has, want.rules):
			return fmt.Sprintf("were changed: chain %s has other rules", name), nil
		}
	}
	return "", nil
}

// isDormant reports whether the table exists with the flag dormant, which disables its chains.
func (t *Handle) isDormant() (is bool, err error) {
	ask, err := t.tableMessage(unix.NFT_MSG_GETTABLE, 0, t.Table)
	if err != nil {
		return false, err
	}
	err = t.dump(ask, func(data []byte) {
		walk(data[4:], func(kind uint16, v []byte) {
			if kind == unix.NFTA_TABLE_FLAGS && len(v) == 4 {
				is = binary.BigEndian.Uint32(v)&unix.NFT_TABLE_F_DORMANT != 0
			}
		})
	})
	return is, err
}

// Install writes the chains and rules of a registered table in one transaction. It first deletes the chains with the given names, or
// without names all chains of the table, even other programs', because the kernel cannot change a chain's hook or priority. Sets keep their
// elements.
func Install(op, table string, build func(Ruleset) error, names ...string) error {
	t, err := Open(table)
	if err != nil {
		return err
	}
	defer t.Close()
	if err := t.clearDormant(); err != nil {
		return err
	}
	for range maxRaces {
		var old []string
		if old, err = t.existingChains(names); err != nil {
			return err
		}
		err = Build(op, func(c *nftables.Conn) error {
			r := NewRuleset(c, TableOf(table).Netlink())
			for _, name := range old { // no rule may jump to a deleted chain
				c.FlushChain(&nftables.Chain{Table: r.Table, Name: name})
			}
			for _, name := range old {
				c.DelChain(&nftables.Chain{Table: r.Table, Name: name})
			}
			return build(r)
		})
		if len(old) == 0 || !errors.Is(err, unix.ENOENT) {
			break
		}
	}
	return err
}

// clearDormant enables the chains of a dormant table in a transaction of its own, because the kernel refuses new base chains in the same
// one.
func (t *Handle) clearDormant() error {
	if dormant, err := t.isDormant(); err != nil || !dormant {
		return err
	}
	return Build("nft wake table "+t.Table, func(c *nftables.Conn) error {
		c.AddTable(TableOf(t.Table).Netlink())
		return nil
	})
}

// existingChains returns those of the names that are chains of the table. Without names, it reads all chains of the address family and
// returns those of the table.
func (t *Handle) existingChains(names []string) (found []string, err error) {
	for _, name := range names {
		if ok, err := t.HasChain(Place{t.family, t.Table, name}); err != nil {
			return nil, err
		} else if ok {
			found = append(found, name)
		}
	}
	if len(names) > 0 {
		return found, nil
	}
	ask, err := t.tableMessage(unix.NFT_MSG_GETCHAIN, mdl.Dump, t.Table)
	if err != nil {
		return nil, err
	}
	err = t.dump(ask, func(data []byte) {
		var table, name string
		walk(data[4:], func(kind uint16, v []byte) {
			switch kind {
			case unix.NFTA_CHAIN_TABLE:
				table = text(v)
			case unix.NFTA_CHAIN_NAME:
				name = text(v)
			}
		})
		if table == t.Table && data[0] == t.family {
			found = append(found, name)
		}
	})
	return found, err
}

// shapeOf encodes an expression as text that is the same for the same effect: its name and those attributes that every kernel returns
// unchanged. It leaves out registers, whose numbers the kernel may change. A missing attribute equals one with value zero.
func shapeOf(data []byte) string {
	var name string
	attributes := map[uint16][]byte{}
	walk(data, func(kind uint16, v []byte) {
		switch kind {
		case unix.NFTA_EXPR_NAME:
			name = text(v)
		case unix.NFTA_EXPR_DATA:
			walk(v, func(kind uint16, v []byte) { attributes[kind] = v })
		}
	})
	shape := name
	plain, nested := shapeAttributes(name)
	for _, kind := range plain {
		shape += fmt.Sprintf(" %x", text(attributes[kind]))
	}
	for _, kind := range nested {
		shape += " " + dataShape(attributes[kind])
	}
	return shape + ";"
}

// dataShape encodes a value or a verdict for shapeOf.
func dataShape(data []byte) (shape string) {
	walk(data, func(kind uint16, v []byte) {
		switch kind {
		case unix.NFTA_DATA_VALUE:
			shape += fmt.Sprintf("%x", text(v))
		case unix.NFTA_DATA_VERDICT:
			walk(v, func(_ uint16, v []byte) { shape += fmt.Sprintf("%x,", text(v)) })
		}
	})
	return shape
}

// shapeAttributes returns the attributes that shapeOf encodes: plain ones with a number or name, nested ones with a value or verdict.
func shapeAttributes(name string) (plain, nested []uint16) {
	switch name {
	case "meta":
		return []uint16{unix.NFTA_META_KEY}, nil
	case "payload":
		return []uint16{unix.NFTA_PAYLOAD_BASE, unix.NFTA_PAYLOAD_OFFSET, unix.NFTA_PAYLOAD_LEN}, nil
	case "lookup":
		return []uint16{unix.NFTA_LOOKUP_SET, unix.NFTA_LOOKUP_FLAGS}, nil
	case "cmp":
		return []uint16{unix.NFTA_CMP_OP}, []uint16{unix.NFTA_CMP_DATA}
	case "immediate":
		return nil, []uint16{unix.NFTA_IMMEDIATE_DATA}
	case "bitwise":
		return nil, []uint16{unix.NFTA_BITWISE_MASK, unix.NFTA_BITWISE_XOR}
	case "nat":
		return []uint16{unix.NFTA_NAT_TYPE, unix.NFTA_NAT_FAMILY}, nil
	}
	return nil, nil
}

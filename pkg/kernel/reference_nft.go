// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables/userdata"
	mdl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// place is a chain in nf_tables, or with an empty chain every chain of a table.
type place struct {
	family       byte
	table, chain string
}

// rule is what is known of a rule of others: enough to tell whose it is and to delete it.
type rule struct {
	place
	handle  []byte
	comment string
	jump    string   // the chain that it leads to
	values  [][]byte // what it compares with and loads: addresses and ports among others
}

// request encodes a message about chains or rules.
func (p place) request(kind int, flags mdl.HeaderFlags, fill func(*mdl.AttributeEncoder)) (mdl.Message, error) {
	enc := mdl.NewAttributeEncoder()
	enc.ByteOrder = binary.BigEndian
	fill(enc)
	data, err := enc.Encode()
	if err != nil {
		return mdl.Message{}, fmt.Errorf("encode nftables request: %w", err)
	}
	return mdl.Message{Header: mdl.Header{Type: mdl.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind), Flags: mdl.Request | flags},
		Data: append([]byte{p.family, 0, 0, 0}, data...)}, nil
}

func (p place) asChain(kind int, flags mdl.HeaderFlags) (mdl.Message, error) {
	return p.request(kind, flags, func(enc *mdl.AttributeEncoder) {
		enc.String(unix.NFTA_CHAIN_TABLE, p.table)
		enc.String(unix.NFTA_CHAIN_NAME, p.chain)
	})
}

// hasChain asks for one chain by its name.
func (t *nft) hasChain(p place) (bool, error) {
	msg, err := p.asChain(unix.NFT_MSG_GETCHAIN, 0)
	if err != nil {
		return false, err
	}
	_, err = t.conn.ask(msg)
	if err == nil {
		return true, nil
	}
	// ERANGE: the name is longer than any that exists.
	if ignoreNoNFT(fault.Ignore(err, unix.ENOENT, unix.ERANGE)) == nil {
		return false, nil
	}
	return false, fmt.Errorf("nft list chain %s %s: %w", p.table, p.chain, err)
}

// rules lists the rules of a chain or a table; none when it is not there.
func (t *nft) rules(p place) ([]rule, error) {
	msg, err := p.request(unix.NFT_MSG_GETRULE, mdl.Dump, func(enc *mdl.AttributeEncoder) {
		enc.String(unix.NFTA_RULE_TABLE, p.table)
		if p.chain != "" {
			enc.String(unix.NFTA_RULE_CHAIN, p.chain)
		}
	})
	if err != nil {
		return nil, err
	}
	var found []rule
	err = fault.Retry(func() error {
		found = nil
		replies, err := t.conn.ask(msg)
		for _, reply := range replies {
			if reply.Header.Flags&mdl.DumpInterrupted != 0 {
				return unix.EINTR
			}
			// Kernels before 4.10 list more than was asked for.
			if r := parseRule(reply.Data); r.family == p.family && r.table == p.table && (p.chain == "" || r.chain == p.chain) {
				found = append(found, r)
			}
		}
		return err
	})
	if err = ignoreNoNFT(fault.Ignore(err, unix.ENOENT)); err != nil {
		return nil, fmt.Errorf("nft list rules of %s: %w", p.table, err)
	}
	return found, nil
}

// listedRules is rules with a socket of its own.
func listedRules(p place) ([]rule, error) {
	t, err := openNFT("")
	if err != nil {
		return nil, err
	}
	defer t.close()
	return t.rules(p)
}

func text(b []byte) string { return string(bytes.TrimRight(b, "\x00")) }

// parseRule reads a NFT_MSG_NEWRULE message.
func parseRule(data []byte) (r rule) {
	if len(data) < 4 {
		return r
	}
	r.family = data[0]
	walk(data[4:], func(kind uint16, v []byte) {
		switch kind {
		case unix.NFTA_RULE_TABLE:
			r.table = text(v)
		case unix.NFTA_RULE_CHAIN:
			r.chain = text(v)
		case unix.NFTA_RULE_HANDLE:
			r.handle = slices.Clone(v)
		case unix.NFTA_RULE_USERDATA:
			r.comment, _ = userdata.GetString(v, userdata.TypeComment)
		case unix.NFTA_RULE_EXPRESSIONS:
			walk(v, func(_ uint16, one []byte) { r.parseExpression(one) })
		}
	})
	return r
}

// parseExpression keeps the data of "cmp" and "immediate", whose attributes for it have different numbers.
func (r *rule) parseExpression(data []byte) {
	var name string
	walk(data, func(kind uint16, v []byte) {
		switch kind {
		case unix.NFTA_EXPR_NAME:
			name = text(v)
		case unix.NFTA_EXPR_DATA:
			want := map[string]uint16{"cmp": unix.NFTA_CMP_DATA, "immediate": unix.NFTA_IMMEDIATE_DATA}[name]
			walk(v, func(kind uint16, v []byte) {
				if want != 0 && kind == want {
					r.parseData(v)
				}
			})
		}
	})
}

func (r *rule) parseData(data []byte) {
	walk(data, func(kind uint16, v []byte) {
		switch kind {
		case unix.NFTA_DATA_VALUE:
			r.values = append(r.values, slices.Clone(v))
		case unix.NFTA_DATA_VERDICT:
			walk(v, func(kind uint16, v []byte) {
				if kind == unix.NFTA_VERDICT_CHAIN {
					r.jump = text(v)
				}
			})
		}
	})
}

// has tells whether a value is one of those that the rule compares with or loads.
func (r rule) has(value []byte) bool {
	return slices.ContainsFunc(r.values, func(v []byte) bool { return bytes.Equal(v, value) })
}

// deletion is the message that deletes the rule.
func (r rule) deletion() (mdl.Message, error) {
	return r.request(unix.NFT_MSG_DELRULE, mdl.Acknowledge, func(enc *mdl.AttributeEncoder) {
		enc.String(unix.NFTA_RULE_TABLE, r.table)
		enc.String(unix.NFTA_RULE_CHAIN, r.chain)
		enc.Bytes(unix.NFTA_RULE_HANDLE, r.handle)
	})
}

// deletions lists what deletes the rules of p that match.
func (t *nft) deletions(p place, match func(rule) bool) ([]mdl.Message, error) {
	list, err := t.rules(p)
	if err != nil {
		return nil, err
	}
	var out []mdl.Message
	for _, r := range list {
		if !match(r) {
			continue
		}
		msg, err := r.deletion()
		if err != nil {
			return nil, err
		}
		out = append(out, msg)
	}
	return out, nil
}

// unlink lists what deletes a chain with its rules, and the rules of parent that jump to it. When the chain is not there, which one
// question tells, nothing is listed.
func (t *nft) unlink(parent place, chain string) ([]mdl.Message, error) {
	of := place{parent.family, parent.table, chain}
	ok, err := t.hasChain(of)
	if err != nil || !ok {
		return nil, err
	}
	out, err := t.deletions(parent, func(r rule) bool { return r.jump == chain })
	if err != nil {
		return nil, err
	}
	msg, err := of.asChain(unix.NFT_MSG_DELCHAIN, mdl.Acknowledge)
	return append(out, msg), err
}

// maxRaces bounds how often a removal begins anew.
const maxRaces = 30

// removeListed deletes in one transaction what list names, and begins anew when somebody else was faster with a part of it.
func removeListed(op string, list func(*nft) ([]mdl.Message, error)) error {
	t, err := openNFT("")
	if err != nil {
		return ignoreNoNFT(err)
	}
	defer t.close()
	for range maxRaces {
		var messages []mdl.Message
		if messages, err = list(t); err != nil || len(messages) == 0 {
			return err
		}
		batch := append([]mdl.Message{batchMark(unix.NFNL_MSG_BATCH_BEGIN)}, messages...)
		batch = append(batch, batchMark(unix.NFNL_MSG_BATCH_END))
		err = fault.Change(op, func() error { return t.send(batch) })
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EBUSY) {
			return err
		}
	}
	return err
}

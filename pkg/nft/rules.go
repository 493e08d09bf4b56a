// SPDX-License-Identifier: Apache-2.0

package nft

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

// Place is a chain, or all chains of the table if Chain is empty.
type Place struct {
	Family       byte
	Table, Chain string
}

// Rule is what a caller needs to recognize and delete a rule of another program.
type Rule struct {
	Place
	Comment string
	Jump    string // target chain

	handle []byte
	values [][]byte // values that it compares with or loads, such as addresses and ports
	shape  string   // its expressions, as shapeOf encodes them
}

// newRequest returns a request about chains or rules with the attributes that fill adds.
func (p Place) newRequest(kind int, flags mdl.HeaderFlags, fill func(*mdl.AttributeEncoder)) (mdl.Message, error) {
	enc := mdl.NewAttributeEncoder()
	enc.ByteOrder = binary.BigEndian
	fill(enc)
	data, err := enc.Encode()
	if err != nil {
		return mdl.Message{}, fmt.Errorf("encode nftables request: %w", err)
	}
	return mdl.Message{Header: mdl.Header{Type: mdl.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind), Flags: mdl.Request | flags},
		Data: append([]byte{p.Family, 0, 0, 0}, data...)}, nil
}

func (p Place) asChain(kind int, flags mdl.HeaderFlags) (mdl.Message, error) {
	return p.newRequest(kind, flags, func(enc *mdl.AttributeEncoder) {
		enc.String(unix.NFTA_CHAIN_TABLE, p.Table)
		enc.String(unix.NFTA_CHAIN_NAME, p.Chain)
	})
}

// HasChain reports whether a chain exists, with one request.
func (t *Handle) HasChain(p Place) (bool, error) {
	_, ok, err := t.Chain(p)
	return ok, err
}

// Chain is the kernel's description of a chain. Base is true if it has a hook; only such chains have a policy (such as unix.NF_DROP) and a
// priority. Uses counts its rules, and for a chain without a hook also those that jump to it.
type Chain struct {
	Base     bool
	Policy   uint32
	Hook     uint32
	Priority int32
	Type     string
	Uses     uint32
}

// Chain returns a chain by name. ok is false if it does not exist.
func (t *Handle) Chain(p Place) (state Chain, ok bool, err error) {
	msg, err := p.asChain(unix.NFT_MSG_GETCHAIN, 0)
	if err != nil {
		return state, false, err
	}
	replies, err := t.query(msg)
	// ERANGE means that the name is too long for a chain.
	if err != nil && IgnoreUnsupported(fault.Ignore(err, unix.ENOENT, unix.ERANGE)) == nil || err == nil && len(replies) == 0 {
		return state, false, nil
	}
	if err != nil {
		return state, false, fmt.Errorf("nft list chain %s %s: %w", p.Table, p.Chain, err)
	}
	return parseChain(replies[0].Data), true, nil
}

// parseChain parses a NFT_MSG_NEWCHAIN message.
func parseChain(data []byte) (state Chain) {
	if len(data) < 4 {
		return state
	}
	walk(data[4:], func(kind uint16, value []byte) {
		switch {
		case kind == unix.NFTA_CHAIN_USE && len(value) == 4:
			state.Uses = binary.BigEndian.Uint32(value)
		case kind == unix.NFTA_CHAIN_POLICY && len(value) == 4:
			state.Base, state.Policy = true, binary.BigEndian.Uint32(value)
		case kind == unix.NFTA_CHAIN_TYPE:
			state.Type = text(value)
		case kind == unix.NFTA_CHAIN_HOOK:
			walk(value, func(kind uint16, value []byte) {
				switch {
				case kind == unix.NFTA_HOOK_HOOKNUM && len(value) == 4:
					state.Hook = binary.BigEndian.Uint32(value)
				case kind == unix.NFTA_HOOK_PRIORITY && len(value) == 4:
					state.Priority = int32(binary.BigEndian.Uint32(value))
				}
			})
		}
	})
	return state
}

// Rules returns the rules of a chain or a table. The list is empty if it does not exist.
func (t *Handle) Rules(p Place) ([]Rule, error) {
	msg, err := p.newRequest(unix.NFT_MSG_GETRULE, mdl.Dump, func(enc *mdl.AttributeEncoder) {
		enc.String(unix.NFTA_RULE_TABLE, p.Table)
		if p.Chain != "" {
			enc.String(unix.NFTA_RULE_CHAIN, p.Chain)
		}
	})
	if err != nil {
		return nil, err
	}
	var found []Rule
	err = fault.Retry(func() error {
		found = nil
		replies, err := t.query(msg)
		for _, reply := range replies {
			if reply.Header.Flags&mdl.DumpInterrupted != 0 {
				return unix.EINTR
			}
			// Kernels before 4.10 return the rules of all chains and tables.
			if r := parseRule(reply.Data); r.Family == p.Family && r.Table == p.Table && (p.Chain == "" || r.Chain == p.Chain) {
				found = append(found, r)
			}
		}
		return err
	})
	if err = IgnoreUnsupported(fault.Ignore(err, unix.ENOENT)); err != nil {
		return nil, fmt.Errorf("nft list rules of %s: %w", p.Table, err)
	}
	return found, nil
}

// ListRules is Rules on a new connection.
func ListRules(p Place) ([]Rule, error) {
	t, err := Open("")
	if err != nil {
		return nil, err
	}
	defer t.Close()
	return t.Rules(p)
}

func text(b []byte) string { return string(bytes.TrimRight(b, "\x00")) }

// parseRule parses a NFT_MSG_NEWRULE message.
func parseRule(data []byte) (r Rule) {
	if len(data) < 4 {
		return r
	}
	r.Family = data[0]
	walk(data[4:], func(kind uint16, v []byte) {
		switch kind {
		case unix.NFTA_RULE_TABLE:
			r.Table = text(v)
		case unix.NFTA_RULE_CHAIN:
			r.Chain = text(v)
		case unix.NFTA_RULE_HANDLE:
			r.handle = slices.Clone(v)
		case unix.NFTA_RULE_USERDATA:
			r.Comment, _ = userdata.GetString(v, userdata.TypeComment)
		case unix.NFTA_RULE_EXPRESSIONS:
			walk(v, func(_ uint16, one []byte) {
				r.parseExpression(one)
				r.shape += shapeOf(one)
			})
		}
	})
	return r
}

// parseExpression stores the data of "cmp" and "immediate" expressions, which have it in different attributes.
func (r *Rule) parseExpression(data []byte) {
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

func (r *Rule) parseData(data []byte) {
	walk(data, func(kind uint16, v []byte) {
		switch kind {
		case unix.NFTA_DATA_VALUE:
			r.values = append(r.values, slices.Clone(v))
		case unix.NFTA_DATA_VERDICT:
			walk(v, func(kind uint16, v []byte) {
				if kind == unix.NFTA_VERDICT_CHAIN {
					r.Jump = text(v)
				}
			})
		}
	})
}

// Has reports whether a "cmp" or "immediate" expression of the rule contains value.
func (r Rule) Has(value []byte) bool {
	return slices.ContainsFunc(r.values, func(v []byte) bool { return bytes.Equal(v, value) })
}

func (r Rule) deleteMessage() (mdl.Message, error) {
	return r.newRequest(unix.NFT_MSG_DELRULE, mdl.Acknowledge, func(enc *mdl.AttributeEncoder) {
		enc.String(unix.NFTA_RULE_TABLE, r.Table)
		enc.String(unix.NFTA_RULE_CHAIN, r.Chain)
		enc.Bytes(unix.NFTA_RULE_HANDLE, r.handle)
	})
}

// Removal lists what Remove deletes from tables of other programs.
type Removal struct {
	Chains []Jump
	Rules  []Match
}

// Jump is a chain and, in the same table, the parent whose rules jump to it.
type Jump struct {
	Parent Place
	Chain  string
}

// Match selects the rules of a chain or table for which Want returns true.
type Match struct {
	In   Place
	Want func(Rule) bool
}

// deleteMessages returns messages that delete what exists of the removal.
func (r Removal) deleteMessages(t *Handle) ([]mdl.Message, error) {
	var out []mdl.Message
	for _, jump := range r.Chains {
		more, err := t.deleteChainMessages(jump)
		if err != nil {
			return nil, err
		}
		out = append(out, more...)
	}
	for _, match := range r.Rules {
		more, err := t.deletions(match)
		if err != nil {
			return nil, err
		}
		out = append(out, more...)
	}
	return out, nil
}

func (t *Handle) deletions(m Match) ([]mdl.Message, error) {
	list, err := t.Rules(m.In)
	if err != nil {
		return nil, err
	}
	var out []mdl.Message
	for _, r := range list {
		if !m.Want(r) {
			continue
		}
		msg, err := r.deleteMessage()
		if err != nil {
			return nil, err
		}
		out = append(out, msg)
	}
	return out, nil
}

// deleteChainMessages returns messages that delete a chain, its rules and all jumps to it: none, after one request, if it is missing.
func (t *Handle) deleteChainMessages(j Jump) ([]mdl.Message, error) {
	of := Place{j.Parent.Family, j.Parent.Table, j.Chain}
	ok, err := t.HasChain(of)
	if err != nil || !ok {
		return nil, err
	}
	out, err := t.deletions(Match{j.Parent, func(r Rule) bool { return r.Jump == j.Chain }})
	if err != nil {
		return nil, err
	}
	msg, err := of.asChain(unix.NFT_MSG_DELCHAIN, mdl.Acknowledge)
	return append(out, msg), err
}

// maxRaces limits the attempts for a transaction that fails because another program changes the ruleset meanwhile.
const maxRaces = 30

// Remove deletes the objects of a removal in one transaction. It retries if another program meanwhile deletes one of them or adds a rule
// that uses it. It is a no-op if none exists.
func Remove(op string, removal Removal) error {
	t, err := Open("")
	if err != nil {
		return IgnoreUnsupported(err)
	}
	defer t.Close()
	for range maxRaces {
		var messages []mdl.Message
		if messages, err = removal.deleteMessages(t); err != nil || len(messages) == 0 {
			return err
		}
		batch := append([]mdl.Message{batchMark(unix.NFNL_MSG_BATCH_BEGIN)}, messages...)
		batch = append(batch, batchMark(unix.NFNL_MSG_BATCH_END))
		err = fault.Change(op, func() error { return t.sendBatch(batch) })
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EBUSY) {
			return err
		}
	}
	return err
}

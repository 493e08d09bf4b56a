// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

const sizeofNfGenMsg = 4

// x/sys/unix lacks these nftables attributes.
const (
	nftaTableHandle, nftaTablePad, nftaTableUserdata, nftaTableOwner = 4, 5, 6, 7
	nftaChainFlags, nftaChainID, nftaChainUserdata                   = 10, 11, 12
	nftaSetHandle, nftaSetExpr, nftaSetExpressions, nftaSetCount     = 16, 17, 18, 20
	nftaElemObject, nftaElemKeyEnd, nftaElemExpressions              = 9, 10, 11
	nftaObjHandle, nftaObjPad, nftaObjUserdata                       = 6, 7, 8
	nftaFlowtableTable, nftaFlowtableName                            = 1, 2
	nftaFlowtableHook, nftaFlowtableUse                              = 3, 4
	nftaFlowtableHandle, nftaFlowtablePad, nftaFlowtableFlags        = 5, 6, 7
)

func nftType(message uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | message }

func families() map[byte]string {
	return map[byte]string{
		unix.NFPROTO_INET: "inet", unix.NFPROTO_IPV4: "ip", unix.NFPROTO_ARP: "arp",
		unix.NFPROTO_NETDEV: "netdev", unix.NFPROTO_BRIDGE: "bridge", unix.NFPROTO_IPV6: "ip6",
	}
}

// An nftObject is one table, chain, rule, set, element, object or flowtable of nftables.
type nftObject struct {
	family byte
	attrs  []attr
}

func (o nftObject) str(typ uint16) string { return str(nil, findAttr(o.attrs, typ)) }

// familyTable returns the address family and the table of an object.
func (o nftObject) familyTable() string { return families()[o.family] + " " + o.str(1) }

func (s *socket) dumpNft(what string, message uint16, body []byte) ([]nftObject, error) {
	messages, err := s.dump("nftables "+what, nftType(message), body)
	if err != nil {
		return nil, err
	}
	var out []nftObject
	for _, m := range messages {
		list, _ := parseAttrs(m[sizeofNfGenMsg:])
		out = append(out, nftObject{m[0], list})
	}
	return out, nil
}

func (c *collector) collectNft(s *socket) error {
	for _, part := range []func(*socket) error{
		c.collectTables, c.collectChains, c.collectNftRules, c.collectSets, c.collectObjects, c.collectFlowtables,
	} {
		if err := part(s); err != nil {
			return err
		}
	}
	return nil
}

func (c *collector) collectTables(s *socket) error {
	tables, err := s.dumpNft("tables", unix.NFT_MSG_GETTABLE, make([]byte, sizeofNfGenMsg))
	by := schema{
		unix.NFTA_TABLE_NAME: omit(), unix.NFTA_TABLE_USE: omit(), nftaTableHandle: omit(), nftaTablePad: omit(),
		unix.NFTA_TABLE_FLAGS: {"flags", bigNumber},
		nftaTableUserdata:     {"userdata", userdataText},
		nftaTableOwner:        {"owner", bigNumber},
	}
	for _, t := range tables {
		c.add("nft table "+t.familyTable(), c.toFields(t.attrs, by)...)
	}
	return err
}

func (c *collector) collectChains(s *socket) error {
	chains, err := s.dumpNft("chains", unix.NFT_MSG_GETCHAIN, make([]byte, sizeofNfGenMsg))
	hook := schemaColumn(schema{
		unix.NFTA_HOOK_HOOKNUM: {"hook", bigNumber}, unix.NFTA_HOOK_PRIORITY: {"priority", bigNumber}, unix.NFTA_HOOK_DEV: {"dev", str},
	})
	by := schema{
		unix.NFTA_CHAIN_TABLE: omit(), unix.NFTA_CHAIN_NAME: omit(), unix.NFTA_CHAIN_HANDLE: omit(),
		unix.NFTA_CHAIN_USE: omit(), unix.NFTA_CHAIN_COUNTERS: omit(), unix.NFTA_CHAIN_PAD: omit(), nftaChainID: omit(),
		unix.NFTA_CHAIN_HOOK:   {"hook", hook},
		unix.NFTA_CHAIN_POLICY: {"policy", bigNumber},
		unix.NFTA_CHAIN_TYPE:   {"type", str},
		nftaChainFlags:         {"flags", bigNumber},
		nftaChainUserdata:      {"userdata", userdataText},
	}
	for _, ch := range chains {
		c.add("nft chain "+ch.familyTable()+" "+ch.str(unix.NFTA_CHAIN_NAME), c.toFields(ch.attrs, by)...)
	}
	return err
}

// collectNftRules keeps the order of rules, which a dump lists chain by chain.
func (c *collector) collectNftRules(s *socket) error {
	rules, err := s.dumpNft("rules", unix.NFT_MSG_GETRULE, make([]byte, sizeofNfGenMsg))
	byChain := map[string][]string{}
	for _, r := range rules {
		chain := "nft rule " + r.familyTable() + " " + r.str(unix.NFTA_RULE_CHAIN)
		line := expressions(findAttr(r.attrs, unix.NFTA_RULE_EXPRESSIONS))
		if u := findAttr(r.attrs, unix.NFTA_RULE_USERDATA); u != nil {
			line += " userdata " + userdataText(c, u)
		}
		if compat := findAttr(r.attrs, unix.NFTA_RULE_COMPAT); compat != nil {
			line += " compat " + treeText(compat)
		}
		byChain[chain] = append(byChain[chain], line)
	}
	for _, chain := range sortedKeys(byChain) {
		c.addList(chain, byChain[chain])
	}
	return err
}

func (c *collector) collectSets(s *socket) error {
	sets, err := s.dumpNft("sets", unix.NFT_MSG_GETSET, make([]byte, sizeofNfGenMsg))
	if err != nil {
		return err
	}
	by := schema{
		unix.NFTA_SET_TABLE: omit(), unix.NFTA_SET_NAME: omit(), unix.NFTA_SET_ID: omit(), unix.NFTA_SET_PAD: omit(),
		nftaSetHandle: omit(), nftaSetCount: omit(),
		unix.NFTA_SET_FLAGS:       {"flags", bigNumber},
		unix.NFTA_SET_KEY_TYPE:    {"keytype", bigNumber},
		unix.NFTA_SET_KEY_LEN:     {"keylen", bigNumber},
		unix.NFTA_SET_DATA_TYPE:   {"datatype", bigNumber},
		unix.NFTA_SET_DATA_LEN:    {"datalen", bigNumber},
		unix.NFTA_SET_POLICY:      {"policy", bigNumber},
		unix.NFTA_SET_DESC:        {"desc", treeColumn},
		unix.NFTA_SET_TIMEOUT:     {"timeout", bigNumber},
		unix.NFTA_SET_GC_INTERVAL: {"gc", bigNumber},
		unix.NFTA_SET_USERDATA:    {"userdata", userdataText},
		nftaSetExpr:               {"expr", expressionField},
		nftaSetExpressions:        {"exprs", expressionsField},
	}
	for _, set := range sets {
		c.add("nft set "+set.familyTable()+" "+set.str(unix.NFTA_SET_NAME), c.toFields(set.attrs, by)...)
		if err := c.collectElements(s, set); err != nil {
			return err
		}
	}
	return nil
}

// collectElements names an element's record by its key, so that Diff reports a new value as a change of the element.
func (c *collector) collectElements(s *socket, set nftObject) error {
	body := []byte{set.family, 0, 0, 0}
	body = appendAttr(body, unix.NFTA_SET_ELEM_LIST_TABLE, findAttr(set.attrs, unix.NFTA_SET_TABLE))
	body = appendAttr(body, unix.NFTA_SET_ELEM_LIST_SET, findAttr(set.attrs, unix.NFTA_SET_NAME))
	lists, err := s.dumpNft("elements", unix.NFT_MSG_GETSETELEM, body)
	by := schema{
		unix.NFTA_SET_ELEM_KEY: omit(), nftaElemKeyEnd: omit(), unix.NFTA_SET_ELEM_EXPIRATION: omit(), unix.NFTA_SET_ELEM_PAD: omit(),
		unix.NFTA_SET_ELEM_DATA:     {"data", treeColumn},
		unix.NFTA_SET_ELEM_FLAGS:    {"flags", bigNumber},
		unix.NFTA_SET_ELEM_TIMEOUT:  {"timeout", bigNumber},
		unix.NFTA_SET_ELEM_USERDATA: {"userdata", userdataText},
		unix.NFTA_SET_ELEM_EXPR:     {"expr", expressionField},
		nftaElemObject:              {"object", str},
		nftaElemExpressions:         {"exprs", expressionsField},
	}
	for _, l := range lists {
		for _, element := range nestedAttrs(l.attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS) {
			e, _ := parseAttrs(element.data)
			name := "nft element " + set.familyTable() + " " + set.str(unix.NFTA_SET_NAME) + " " + elementKey(e)
			c.add(name, c.toFields(e, by)...)
		}
	}
	return err
}

func elementKey(e []attr) string {
	key := treeText(findAttr(e, unix.NFTA_SET_ELEM_KEY))
	if end := findAttr(e, nftaElemKeyEnd); end != nil {
		key += "-" + treeText(end)
	}
	if flags := findAttr(e, unix.NFTA_SET_ELEM_FLAGS); flags != nil {
		key += " flags " + bigNumber(nil, flags) // the end of an interval has a key too
	}
	return key
}

func (c *collector) collectObjects(s *socket) error {
	objects, err := s.dumpNft("objects", unix.NFT_MSG_GETOBJ, make([]byte, sizeofNfGenMsg))
	for _, o := range objects {
		kind := bigNumber(c, findAttr(o.attrs, unix.NFTA_OBJ_TYPE))
		c.add("nft object "+o.familyTable()+" "+o.str(unix.NFTA_OBJ_NAME)+" type "+kind, c.toFields(o.attrs, objectSchema(kind))...)
	}
	return err
}

// objectSchema returns the attributes of an nftables object in a snapshot, without the counted packets and bytes.
func objectSchema(kind string) schema {
	const counter, quota = "1", "2"
	by := schema{
		unix.NFTA_OBJ_TABLE: omit(), unix.NFTA_OBJ_NAME: omit(), unix.NFTA_OBJ_TYPE: omit(), unix.NFTA_OBJ_USE: omit(),
		nftaObjHandle: omit(), nftaObjPad: omit(),
		unix.NFTA_OBJ_DATA: {"data", treeColumn},
		nftaObjUserdata:    {"userdata", userdataText},
	}
	switch kind {
	case counter:
		by[unix.NFTA_OBJ_DATA] = omit()
	case quota:
		by[unix.NFTA_OBJ_DATA] = column{"data", func(_ *collector, b []byte) string { return quotaText(b) }}
	}
	return by
}

func (c *collector) collectFlowtables(s *socket) error {
	tables, err := s.dumpNft("flowtables", unix.NFT_MSG_GETFLOWTABLE, make([]byte, sizeofNfGenMsg))
	by := schema{
		nftaFlowtableTable: omit(), nftaFlowtableName: omit(), nftaFlowtableUse: omit(),
		nftaFlowtableHandle: omit(), nftaFlowtablePad: omit(),
		nftaFlowtableHook:  {"hook", treeColumn},
		nftaFlowtableFlags: {"flags", bigNumber},
	}
	for _, t := range tables {
		c.add("nft flowtable "+t.familyTable()+" "+t.str(nftaFlowtableName), c.toFields(t.attrs, by)...)
	}
	return err
}

// quotaText formats the limit of a quota without the used amount.
func quotaText(b []byte) string {
	const size, flags = 1, 2
	list, _ := parseAttrs(b)
	return "size " + bigNumber(nil, findAttr(list, size)) + " flags " + bigNumber(nil, findAttr(list, flags))
}

func expressionField(_ *collector, b []byte) string { return expressionText(b) }

func expressionsField(_ *collector, b []byte) string { return expressions(b) }

func expressions(b []byte) string {
	list, _ := parseAttrs(b)
	var out []string
	for _, a := range list {
		out = append(out, expressionText(a.data))
	}
	return strings.Join(out, " ")
}

// expressionText formats an expression of a rule without its counters.
func expressionText(b []byte) string {
	list, _ := parseAttrs(b)
	name := str(nil, findAttr(list, unix.NFTA_EXPR_NAME))
	switch name {
	case "counter", "last":
		return name
	case "quota":
		return "quota " + quotaText(findAttr(list, unix.NFTA_EXPR_DATA))
	}
	return name + treeText(findAttr(list, unix.NFTA_EXPR_DATA))
}

// userdataText formats user data of nftables objects, where nft and libraries store comments: entries of type, length and value.
func userdataText(_ *collector, b []byte) string {
	var out []string
	for rest := b; len(rest) > 0; {
		if len(rest) < 2 || int(rest[1]) > len(rest)-2 {
			return bytesText(b)
		}
		end := 2 + int(rest[1])
		out = append(out, fmt.Sprintf("%d:%s", rest[0], bytesText(rest[2:end])))
		rest = rest[end:]
	}
	return strings.Join(out, " ")
}

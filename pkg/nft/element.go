// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"github.com/google/nftables/userdata"
	mdl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// nftaKeyEnd is NFTA_SET_ELEM_KEY_END of include/uapi/linux/netfilter/nf_tables.h, which package unix lacks.
const nftaKeyEnd = 10

// MaxComment is the length of the longest comment that nft(8) shows, with the terminating zero.
const MaxComment = 128

// Element is an element of an nftables set or map. Its comment names the owner.
type Element struct {
	Set     string
	Key     []byte
	Last    []byte // last key of an interval of concatenated keys
	KeyEnd  bool   // marks the end of an interval: Key is the first value after it
	Value   []byte
	Comment string
}

// Key returns the key of an element with concatenated fields, each padded to a multiple of four bytes as nf_tables requires.
func Key(fields ...[]byte) []byte {
	var out []byte
	for _, f := range fields {
		out = append(out, f...)
		for len(out)%4 != 0 {
			out = append(out, 0)
		}
	}
	return out
}

// IfName encodes an interface name as 16 bytes, padded with zeros.
func IfName(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func listOf(elements []Element) func(*mdl.AttributeEncoder) error {
	return func(list *mdl.AttributeEncoder) error {
		for i, e := range elements {
			list.Nested(uint16(i+1), e.encode)
		}
		return nil
	}
}

func (e Element) encode(enc *mdl.AttributeEncoder) error {
	value := func(b []byte) func(*mdl.AttributeEncoder) error {
		return func(n *mdl.AttributeEncoder) error {
			n.Bytes(unix.NFTA_DATA_VALUE, b)
			return nil
		}
	}
	if e.KeyEnd {
		enc.Uint32(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
	}
	enc.Nested(unix.NFTA_SET_ELEM_KEY, value(e.Key))
	if e.Last != nil {
		enc.Nested(nftaKeyEnd, value(e.Last))
	}
	if e.Value != nil {
		enc.Nested(unix.NFTA_SET_ELEM_DATA, value(e.Value))
	}
	if e.Comment != "" {
		enc.Bytes(unix.NFTA_SET_ELEM_USERDATA, userdata.AppendString(nil, userdata.NFTNL_UDATA_SET_ELEM_COMMENT, e.Comment))
	}
	return nil
}

// parseElements parses a NFT_MSG_NEWSETELEM message.
func parseElements(data []byte) (all []Element) {
	if len(data) < 4 {
		return nil
	}
	walk(data[4:], func(kind uint16, list []byte) {
		if kind == unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			walk(list, func(_ uint16, one []byte) { all = append(all, parseOne(one)) })
		}
	})
	return all
}

func parseOne(data []byte) (e Element) {
	value := func(nested []byte) (b []byte) {
		walk(nested, func(kind uint16, v []byte) {
			if kind == unix.NFTA_DATA_VALUE {
				b = v
			}
		})
		return b
	}
	walk(data, func(kind uint16, v []byte) {
		switch kind {
		case unix.NFTA_SET_ELEM_KEY:
			e.Key = value(v)
		case nftaKeyEnd:
			e.Last = value(v)
		case unix.NFTA_SET_ELEM_FLAGS:
			e.KeyEnd = len(v) == 4 && v[3]&unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_DATA:
			e.Value = value(v)
		case unix.NFTA_SET_ELEM_USERDATA:
			e.Comment, _ = userdata.GetString(v, userdata.NFTNL_UDATA_SET_ELEM_COMMENT)
		}
	})
	return e
}

func walk(data []byte, f func(kind uint16, value []byte)) {
	dec, err := mdl.NewAttributeDecoder(data)
	if err != nil {
		return
	}
	for dec.Next() {
		f(dec.Type(), dec.Bytes())
	}
}

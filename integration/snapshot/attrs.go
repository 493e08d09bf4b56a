// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

type attr struct {
	typ  uint16
	data []byte
}

// parseAttrs splits b into netlink attributes. whole is true if nothing is left after the last.
func parseAttrs(b []byte) (list []attr, whole bool) {
	for len(b) >= unix.SizeofRtAttr {
		size := int(native.Uint16(b))
		if size < unix.SizeofRtAttr || size > len(b) {
			return list, false
		}
		const flags = unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER
		list = append(list, attr{native.Uint16(b[2:]) &^ flags, b[unix.SizeofRtAttr:size]})
		b = b[min(align(size), len(b)):]
	}
	return list, len(b) == 0
}

// findAttr returns the data of the first attribute with the given type.
func findAttr(list []attr, typ uint16) []byte {
	for _, a := range list {
		if a.typ == typ {
			return a.data
		}
	}
	return nil
}

// nestedAttrs returns what is nested in the first attribute of a type.
func nestedAttrs(list []attr, typ uint16) []attr {
	inner, _ := parseAttrs(findAttr(list, typ))
	return inner
}

// schema defines how a message's netlink attributes are formatted. Attributes that are not in it, such as those of newer kernels, are shown
// and compared as raw data.
type schema map[uint16]column

// column defines how one attribute is formatted. Without show, it is not in the snapshot.
type column struct {
	name string
	show func(c *collector, data []byte) string
}

func omit() column { return column{} }

func (c *collector) toFields(list []attr, by schema) []field {
	var out []field
	for _, a := range list {
		col, known := by[a.typ]
		switch {
		case !known:
			out = append(out, field{fmt.Sprintf("attribute%d", a.typ), treeText(a.data)})
		case col.show != nil:
			if value := col.show(c, a.data); value != "" {
				out = append(out, field{col.name, value})
			}
		}
	}
	return out
}

func joinFields(fields []field) string {
	var words []string
	for _, f := range fields {
		words = append(words, f.name, f.value)
	}
	return strings.Join(words, " ")
}

func number(_ *collector, b []byte) string {
	switch len(b) {
	case 1:
		return strconv.Itoa(int(b[0]))
	case 2:
		return strconv.Itoa(int(native.Uint16(b)))
	case 4:
		return strconv.FormatUint(uint64(native.Uint32(b)), 10)
	case 8:
		return strconv.FormatUint(native.Uint64(b), 10)
	}
	return hex.EncodeToString(b)
}

// bigNumber formats a number in network byte order, which nfnetlink uses.
func bigNumber(_ *collector, b []byte) string {
	switch len(b) {
	case 4:
		return strconv.FormatInt(int64(int32(binary.BigEndian.Uint32(b))), 10)
	case 8:
		return strconv.FormatUint(binary.BigEndian.Uint64(b), 10)
	}
	return hex.EncodeToString(b)
}

func nonZero(c *collector, b []byte) string {
	if s := number(c, b); s != "0" {
		return s
	}
	return ""
}

func str(_ *collector, b []byte) string { return unix.ByteSliceToString(b) }

func mac(_ *collector, b []byte) string { return net.HardwareAddr(b).String() }

func raw(_ *collector, b []byte) string { return bytesText(b) }

func ip(_ *collector, b []byte) string {
	if addr, ok := netip.AddrFromSlice(b); ok {
		return addr.String()
	}
	return hex.EncodeToString(b)
}

func linkIndex(c *collector, b []byte) string {
	if len(b) != 4 {
		return hex.EncodeToString(b)
	}
	return c.linkName(native.Uint32(b))
}

// treeColumn is a column's show function for treeText.
func treeColumn(_ *collector, b []byte) string { return treeText(b) }

// schemaColumn returns a column's show function for attributes nested in a schema.
func schemaColumn(by schema) func(*collector, []byte) string {
	return func(c *collector, b []byte) string {
		list, _ := parseAttrs(b)
		return "{" + joinFields(c.toFields(list, by)) + "}"
	}
}

// treeText formats data of unknown structure: as nested attributes if it parses as such, or else as text or hexadecimal digits.
func treeText(b []byte) string {
	list, whole := parseAttrs(b)
	if !whole || len(list) == 0 || !plausible(list) {
		return bytesText(b)
	}
	var words []string
	for _, a := range list {
		words = append(words, fmt.Sprintf("%d:%s", a.typ, treeText(a.data)))
	}
	return "{" + strings.Join(words, " ") + "}"
}

func plausible(list []attr) bool {
	for _, a := range list {
		if a.typ > 64 {
			return false
		}
	}
	return true
}

// bytesText formats printable bytes as quoted text, and all other bytes as hexadecimal digits.
func bytesText(b []byte) string {
	if s := strings.TrimRight(string(b), "\x00"); len(s) >= 3 && isText(s) {
		return strconv.Quote(s)
	}
	return hex.EncodeToString(b)
}

func isText(s string) bool {
	for _, r := range s {
		if r < ' ' || r > '~' {
			return false
		}
	}
	return true
}

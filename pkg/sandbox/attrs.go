// SPDX-License-Identifier: Apache-2.0

package sandbox

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

// An attr is one netlink attribute.
type attr struct {
	typ  uint16
	data []byte
}

// parseAttrs splits b into attributes, and reports whether nothing was left.
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

// find returns the data of the first attribute of a type.
func find(list []attr, typ uint16) []byte {
	for _, a := range list {
		if a.typ == typ {
			return a.data
		}
	}
	return nil
}

// nestedAttrs returns the attributes inside the attribute of a type.
func nestedAttrs(list []attr, typ uint16) []attr {
	inner, _ := parseAttrs(find(list, typ))
	return inner
}

// A schema defines how to format the attributes of a message. Unlisted attributes are shown raw, so that a newer kernel's attributes are
// compared too.
type schema map[uint16]column

// A column without a show function is left out.
type column struct {
	name string
	show func(c *collector, data []byte) string
}

func omit() column { return column{} }

// fields converts attributes to named fields, as the schema describes them.
func (c *collector) fields(list []attr, by schema) []field {
	var out []field
	for _, a := range list {
		col, known := by[a.typ]
		switch {
		case !known:
			out = append(out, field{fmt.Sprintf("attribute%d", a.typ), tree(a.data)})
		case col.show != nil:
			if value := col.show(c, a.data); value != "" {
				out = append(out, field{col.name, value})
			}
		}
	}
	return out
}

// text joins fields to one line.
func text(fields []field) string {
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

// bigNumber formats a number in network byte order, as nfnetlink uses it.
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

// nested is tree as a column.
func nested(_ *collector, b []byte) string { return tree(b) }

// inside formats nested attributes by a schema.
func inside(by schema) func(*collector, []byte) string {
	return func(c *collector, b []byte) string {
		list, _ := parseAttrs(b)
		return "{" + text(c.fields(list, by)) + "}"
	}
}

// tree formats data of unknown form: as nested attributes if it parses as such, else as text or hex.
func tree(b []byte) string {
	list, whole := parseAttrs(b)
	if !whole || len(list) == 0 || !plausible(list) {
		return bytesText(b)
	}
	var words []string
	for _, a := range list {
		words = append(words, fmt.Sprintf("%d:%s", a.typ, tree(a.data)))
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

// bytesText formats bytes as quoted text if they are printable, else as hex.
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

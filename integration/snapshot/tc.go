// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

const (
	sizeofTcMsg = 20
	tcRoot      = 0xffffffff
	tcIngress   = 0xfffffff1
	ingressDown = 0xffff0000 // the parent of filters of an ingress qdisc
	clsactIn    = 0xfffffff2
	clsactOut   = 0xfffffff3

	tcaKind    = 1
	tcaOptions = 2
)

// tcSchema leaves out counters.
func tcSchema(options func(*collector, []byte) string) schema {
	return schema{
		tcaKind:    omit(),
		tcaOptions: {"options", options},
		3:          omit(), // STATS
		4:          omit(), // XSTATS
		5:          omit(), // RATE, an estimate
		7:          omit(), // STATS2
		9:          omit(), // PAD
		12:         omit(), // HW_OFFLOAD
		11:         {"chain", nonZero},
	}
}

// A tcObject is the header that queueing disciplines, classes and filters have in common.
type tcObject struct {
	dev            uint32
	handle, parent uint32
	info           uint32
	kind           string
	attrs          []attr
}

func parseTC(m []byte) tcObject {
	list, _ := parseAttrs(m[sizeofTcMsg:])
	return tcObject{
		dev: native.Uint32(m[4:]), handle: native.Uint32(m[8:]), parent: native.Uint32(m[12:]), info: native.Uint32(m[16:]),
		kind: str(nil, findAttr(list, tcaKind)), attrs: list,
	}
}

// handleText hides a handle that the kernel chose, because the kernel chooses a different handle each time.
func handleText(h uint32) string {
	major, minor := h>>16, h&0xffff
	switch {
	case h == tcRoot:
		return "root"
	case h == tcIngress:
		return "ingress"
	case major >= 0x8000 && major != 0xffff:
		return fmt.Sprintf("auto:%x", minor)
	}
	return fmt.Sprintf("%x:%x", major, minor)
}

func (c *collector) collectTC(s *socket) error {
	messages, err := s.dump("qdiscs", unix.RTM_GETQDISC, make([]byte, sizeofTcMsg))
	if err != nil {
		return err
	}
	parents := map[uint32][]uint32{}
	for _, m := range messages {
		q := parseTC(m)
		if q.handle == 0 { // the kernel's default, which no program set
			continue
		}
		c.add(fmt.Sprintf("qdisc %s %s dev %s parent %s", q.kind, handleText(q.handle), c.linkName(q.dev), handleText(q.parent)),
			c.toFields(q.attrs, tcSchema(qdiscOptions(q.kind)))...)
		parents[q.dev] = append(parents[q.dev], filterParents(q)...)
	}
	for _, dev := range sortedDevs(parents) {
		classes, err := c.collectClasses(s, dev)
		if err != nil {
			return err
		}
		for _, parent := range append(parents[dev], classes...) {
			if err := c.collectFilters(s, dev, parent); err != nil {
				return err
			}
		}
	}
	return nil
}

func sortedDevs(m map[uint32][]uint32) []uint32 {
	var out []uint32
	for dev := range m {
		out = append(out, dev)
	}
	slices.Sort(out)
	return out
}

// filterParents returns the handles of all points at which filters can be attached to a queueing discipline.
func filterParents(q tcObject) []uint32 {
	switch q.kind {
	case "ingress":
		return []uint32{ingressDown}
	case "clsact":
		return []uint32{clsactIn, clsactOut}
	}
	return []uint32{q.handle}
}

// qdiscOptions formats the settings of a queueing discipline. Only htb reports a counter among them, which is left out.
func qdiscOptions(kind string) func(*collector, []byte) string {
	if kind != "htb" {
		return treeColumn
	}
	return schemaColumn(schema{2: {"init", func(_ *collector, b []byte) string { return bytesText(b[:min(12, len(b))]) }}})
}

func (c *collector) collectClasses(s *socket, dev uint32) ([]uint32, error) {
	body := make([]byte, sizeofTcMsg)
	native.PutUint32(body[4:], dev)
	messages, err := s.dump("classes", unix.RTM_GETTCLASS, body)
	if err != nil {
		return nil, err
	}
	var ids []uint32
	for _, m := range messages {
		class := parseTC(m)
		ids = append(ids, class.handle)
		c.add(fmt.Sprintf("class %s %s dev %s parent %s", class.kind, handleText(class.handle), c.linkName(dev), handleText(class.parent)),
			c.toFields(class.attrs, tcSchema(treeColumn))...)
	}
	return ids, nil
}

// collectFilters leaves out the handles of filters, because the kernel chooses them.
func (c *collector) collectFilters(s *socket, dev, parent uint32) error {
	body := make([]byte, sizeofTcMsg)
	native.PutUint32(body[4:], dev)
	native.PutUint32(body[12:], parent)
	messages, err := s.dump("filters", unix.RTM_GETTFILTER, body)
	if err != nil {
		return err
	}
	for _, m := range messages {
		f := parseTC(m)
		c.add(fmt.Sprintf("filter %s dev %s parent %s protocol %04x pref %d %s", f.kind, c.linkName(dev), handleText(parent),
			uint16(f.info)<<8|uint16(f.info)>>8, f.info>>16, joinFields(c.toFields(f.attrs, tcSchema(filterOptions(f.kind))))))
	}
	return nil
}

// filterOptions formats the settings of a classifier without counters. Each classifier stores its actions in another attribute.
func filterOptions(kind string) func(*collector, []byte) string {
	actions := map[string]uint16{
		"u32": 7, "flower": 3, "matchall": 2, "bpf": 1, "basic": 3, "fw": 4, "cgroup": 1, "route": 6, "flow": 9,
	}
	counters := map[string]uint16{"u32": 9, "matchall": 4, "basic": 5}
	return func(c *collector, b []byte) string {
		list, _ := parseAttrs(b)
		var out []field
		for _, a := range list {
			switch a.typ {
			case counters[kind]:
			case actions[kind]:
				out = append(out, field{"actions", c.actionsText(a.data)})
			default:
				out = append(out, field{fmt.Sprint(a.typ), treeText(a.data)})
			}
		}
		return "{" + joinFields(out) + "}"
	}
}

// actionsText formats a list of actions without their indexes, counters and times.
func (c *collector) actionsText(b []byte) string {
	list, _ := parseAttrs(b)
	var out []field
	for _, a := range list {
		act, _ := parseAttrs(a.data)
		kind := str(c, findAttr(act, tcaKind))
		out = append(out, field{kind, joinFields(c.toFields(act, schema{
			1:  omit(),
			2:  {"options", actionOptions(kind)},
			3:  omit(), // INDEX
			4:  omit(), // STATS
			5:  omit(), // PAD
			9:  omit(), // USED_HW_STATS
			10: omit(), // IN_HW_COUNT
		}))})
	}
	return joinFields(out)
}

// actionOptions removes timestamps, the index, and the numbers of references and bindings from an action's parameters.
func actionOptions(kind string) func(*collector, []byte) string {
	times, parms := uint16(1), uint16(2)
	show := func(_ *collector, b []byte) string { return genericParms(b) }
	switch kind {
	case "nat", "csum", "connmark", "ct", "ctinfo", "ife":
		times, parms = 2, 1
	case "police":
		times, parms = 6, 1
		show = func(_ *collector, b []byte) string { return bytesText(b[min(4, len(b)):min(44, len(b))]) }
	case "mirred":
		show = mirredParms
	}
	return func(c *collector, b []byte) string {
		list, _ := parseAttrs(b)
		var out []field
		for _, a := range list {
			switch a.typ {
			case times:
			case parms:
				out = append(out, field{"parms", show(c, a.data)})
			default:
				out = append(out, field{fmt.Sprint(a.typ), treeText(a.data)})
			}
		}
		return joinFields(out)
	}
}

// genericParms formats data that starts with struct tc_gen: index, capabilities, action, references and bindings.
func genericParms(b []byte) string {
	if len(b) < 20 {
		return bytesText(b)
	}
	return fmt.Sprintf("action %d %s", int32(native.Uint32(b[8:])), bytesText(b[20:]))
}

func mirredParms(c *collector, b []byte) string {
	if len(b) < 28 {
		return genericParms(b)
	}
	return fmt.Sprintf("action %d mode %d dev %s", int32(native.Uint32(b[8:])), native.Uint32(b[20:]), linkIndex(c, b[24:28]))
}

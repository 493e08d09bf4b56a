// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
)

// A device passes a textTest if a text attribute of the device is in a list of values.
type textTest struct {
	values []string
	get    func(subject) string
	absent func(n *node, value string) string // why no device of the node can have the value, or ""; nil if that is never known
}

func (t textTest) want() string           { return strings.Join(t.values, ", ") }
func (t textTest) found(d subject) string { return t.get(d) }
func (t textTest) met(d subject) bool     { return slices.Contains(t.values, t.get(d)) }

func (t textTest) missing(n *node) (out []string) {
	for _, value := range t.values {
		if t.absent != nil && t.absent(n, value) != "" {
			out = append(out, t.absent(n, value))
		}
	}
	return out
}

// met reports whether a device meets the condition. A pod may change the driver of its device or have its RDMA device.
func (c condition) met(d subject) bool {
	return c.test.met(d) || d.held && (c.Name == "drivers" || c.Name == "isRdma")
}

// The driver to which the resource binds its devices passes too; otherwise, a device would leave its pool when it is bound.
type driverTest struct{ textTest }

func (t driverTest) met(d subject) bool {
	return t.textTest.met(d) || d.Driver != "" && d.Driver == d.bindTo
}

func absentAddress(n *node, address string) string {
	if slices.ContainsFunc(n.Devices, func(d pci.Device) bool { return d.Address.String() == address }) {
		return ""
	}
	return fmt.Sprintf("no device %s on this node; 'podlace sriov ls' lists the devices", address)
}

func absentNode(n *node, id string) string {
	var online []string
	for _, node := range n.Nodes {
		online = append(online, strconv.Itoa(node.ID))
	}
	if id == strconv.Itoa(pci.Unknown) || slices.Contains(online, id) {
		return ""
	}
	return fmt.Sprintf("no NUMA node %s on this node; available: %s", id, orNone(strings.Join(online, ", ")))
}

// A VF passes a pfTest if the PF of the VF is in the list. A device that is not a VF passes a pfTest if the device itself is in the list.
type pfTest struct {
	ranges []pfRange
	kind   string
	names  func(subject) []string
}

func pfName(d subject) []string { return d.pf.Interfaces }

func rootDevice(d subject) []string { return []string{d.pf.Address.String()} }

func (t pfTest) want() string {
	var texts []string
	for _, p := range t.ranges {
		texts = append(texts, p.text)
	}
	return strings.Join(texts, ", ")
}

func (t pfTest) found(d subject) string {
	names := strings.Join(t.names(d), ", ")
	if d.IsVF() {
		return fmt.Sprintf("%s#%d", names, d.VFIndex)
	}
	return names
}

func (t pfTest) met(d subject) bool {
	return slices.ContainsFunc(t.ranges, func(p pfRange) bool { return t.matches(d, p) && p.contains(d) })
}

// matches reports whether the device's PF has the name in the pfRange, in upper or lower case as with the SR-IOV network device plugin.
func (t pfTest) matches(d subject, p pfRange) bool {
	return slices.ContainsFunc(t.names(d), func(name string) bool { return strings.EqualFold(name, p.pf) })
}

// port returns the interface of the PF by which a selector names a device, or "". A PF may have an interface for each of its ports.
func (s *selector) port(d subject) string {
	for _, c := range s.Conditions {
		t, _ := c.test.(pfTest)
		for _, p := range t.ranges {
			named := func(name string) bool { return strings.EqualFold(name, p.pf) }
			if i := slices.IndexFunc(d.pf.Interfaces, named); i >= 0 && p.contains(d) {
				return d.pf.Interfaces[i]
			}
		}
	}
	return ""
}

func (t pfTest) missing(n *node) (out []string) {
	for _, p := range t.ranges {
		i := slices.IndexFunc(n.subjects, func(d subject) bool { return t.matches(d, p) })
		if i < 0 {
			out = append(out, fmt.Sprintf("no %s %q on this node; PFs here: %s", t.kind, p.pf, orNone(strings.Join(n.pfs(t.names), ", "))))
			continue
		}
		if pf := n.subjects[i].pf; p.highestVF() >= max(pf.TotalVFs, pf.NumVFs) {
			out = append(out, fmt.Sprintf("%s: no VF %d on this node; %s supports at most %d", p.text, p.highestVF(), p.pf,
				max(pf.TotalVFs, pf.NumVFs)))
		}
	}
	return out
}

func orNone(names string) string { return cmp.Or(names, "none") }

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
}

func (t textTest) want() string           { return strings.Join(t.values, ", ") }
func (t textTest) found(d subject) string { return t.get(d) }
func (t textTest) met(d subject) bool     { return slices.Contains(t.values, t.get(d)) }
func (t textTest) missing(*node) []string { return nil }

// A device passes a driverTest if the driver of the device is in the list. A device also passes a driverTest if the device already has the
// driver to which the resource binds its devices. Without this rule for driverTest, a device would leave its pool when it is bound to the
// driver of the resource.
type driverTest []string

func (t driverTest) want() string           { return strings.Join(t, ", ") }
func (t driverTest) found(d subject) string { return d.Driver }
func (t driverTest) missing(*node) []string { return nil }
func (t driverTest) met(d subject) bool {
	return slices.Contains(t, d.Driver) || d.Driver != "" && d.Driver == d.bindTo
}

// A device passes an addressTest if the PCI address of the device is in the list.
type addressTest []pci.Address

func (t addressTest) want() string           { return joinTexts(t, pci.Address.String) }
func (t addressTest) found(d subject) string { return d.Address.String() }
func (t addressTest) met(d subject) bool     { return slices.Contains(t, d.Address) }
func (t addressTest) missing(n *node) (out []string) {
	for _, a := range t {
		if _, ok := n.Device(a); !ok {
			out = append(out, fmt.Sprintf("no device %s on this node; 'podlace sriov ls' lists the devices", a))
		}
	}
	return out
}

// A device passes a nodeTest if the NUMA node of the device is in the list.
type nodeTest []int

func (t nodeTest) want() string           { return joinTexts(t, strconv.Itoa) }
func (t nodeTest) found(d subject) string { return strconv.Itoa(d.NUMANode) }
func (t nodeTest) met(d subject) bool     { return slices.Contains(t, d.NUMANode) }
func (t nodeTest) missing(n *node) (out []string) {
	for _, id := range t {
		if id != pci.Unknown && !n.isOnline(id) {
			out = append(out, fmt.Sprintf("no NUMA node %d on this node; available: %s", id,
				orNone(joinTexts(n.Nodes, func(n pci.Node) string { return strconv.Itoa(n.ID) }))))
		}
	}
	return out
}

// A device passes an rdmaTest if the device supports RDMA.
type rdmaTest struct{}

func (rdmaTest) want() string           { return "true" }
func (rdmaTest) found(d subject) string { return strconv.FormatBool(len(d.RDMA) > 0) }
func (rdmaTest) met(d subject) bool     { return len(d.RDMA) > 0 }
func (rdmaTest) missing(*node) []string { return nil }

// A VF passes a pfTest if the PF of the VF is in the list. A device that is not a VF passes a pfTest if the device itself is in the list.
type pfTest struct {
	ranges []pfRange
	kind   string
	names  func(subject) []string
}

// pfName returns the interface names of the PF of a device.
func pfName(d subject) []string { return d.pf.Interfaces }

// rootDevice returns the PCI address of the PF of a device.
func rootDevice(d subject) []string { return []string{d.pf.Address.String()} }

func (t pfTest) want() string { return joinTexts(t.ranges, func(p pfRange) string { return p.text }) }

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

// matches() reports whether the device's PF has the PF name in the given pfRange. Like the SR-IOV network device plugin, matches() does not
// distinguish upper and lower case in the name.
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

// joinTexts formats the items of a list and joins them with commas.
func joinTexts[T any](list []T, text func(T) string) string {
	parts := make([]string, len(list))
	for i, v := range list {
		parts[i] = text(v)
	}
	return strings.Join(parts, ", ")
}

func orNone(names string) string { return cmp.Or(names, "none") }

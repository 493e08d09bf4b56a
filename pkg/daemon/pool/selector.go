// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
)

var (
	idForm        = regexp.MustCompile(`^[0-9a-fA-F]{4}$`)
	acpiIndexForm = regexp.MustCompile(`^[0-9]{1,10}$`)
)

// readSelectors reads one selector or a list of selectors.
func (r *reader) readSelectors(v value) []selector {
	if v.kind != list {
		return []selector{r.readSelector(v)}
	}
	var out []selector
	r.listOf(func(v value) { out = append(out, r.readSelector(v)) })(v)
	return out
}

func (r *reader) readSelector(v value) selector {
	s := selector{Place: v.Place}
	r.readObject(v, r.selectorKeys(&s))
	return s
}

// selectorKeys returns the keys of a selector and the functions that read their values.
func (r *reader) selectorKeys(s *selector) []field {
	texts := func(check func(string) (string, error), get func(subject) string) func(value) {
		return func(v value) {
			var values []string
			r.stringList(&values, check)(v)
			s.add(v, textTest{values, get})
		}
	}
	fields := []field{
		{"vendors", texts(hexID, func(d subject) string { return d.Vendor })},
		{"devices", texts(hexID, func(d subject) string { return d.Product })},
		{"drivers", func(v value) {
			var values []string
			r.stringList(&values, driverName)(v)
			s.add(v, driverTest(values))
		}},
		{"pciAddresses", func(v value) { s.add(v, r.readAddresses(v)) }},
		{"acpiIndexes", texts(acpiIndex, func(d subject) string { return d.ACPIIndex })},
		{"pfNames", func(v value) { s.add(v, pfTest{r.readRanges(v, interfaceName), "PF", pfName}) }},
		{"rootDevices", func(v value) { s.add(v, pfTest{r.readRanges(v, pciAddress), "root device", rootDevice}) }},
		{"linkTypes", texts(linkType, func(d subject) string { return d.LinkType })},
		{"numaNodes", func(v value) { s.add(v, r.readNodes(v)) }},
		{"isRdma", func(v value) {
			if r.readBoolean(&s.RDMA)(v); s.RDMA {
				s.Conditions = append(s.Conditions, condition{v.Place, "isRdma", rdmaTest{}})
			}
		}},
		{"needVhostNet", r.readBoolean(&s.VhostNet)},
	}
	for _, key := range []string{"ddpProfiles", "pKeys", "vdpaType", "auxTypes", "nicNames"} {
		fields = append(fields, field{key, func(v value) { r.readUnsupported(v, key) }})
	}
	return fields
}

// add() adds a condition to the selector. An empty list of values adds no condition.
func (s *selector) add(v value, t test) {
	if v.kind == list && len(v.items) > 0 {
		s.Conditions = append(s.Conditions, condition{v.Place, v.Key[strings.LastIndexByte(v.Key, '.')+1:], t})
	}
}

func hexID(s string) (string, error) {
	if !idForm.MatchString(s) {
		return "", fmt.Errorf("%+.80q: want four hexadecimal digits, such as 8086", s)
	}
	return strings.ToLower(s), nil
}

func acpiIndex(s string) (string, error) {
	if !acpiIndexForm.MatchString(s) {
		return "", fmt.Errorf("%+.80q: want a number in quotes, such as \"101\"", s)
	}
	return s, nil
}

func linkType(s string) (string, error) {
	if s != pci.Ether && s != pci.InfiniBand {
		return "", fmt.Errorf("%+.80q: want %s or %s", s, pci.Ether, pci.InfiniBand)
	}
	return s, nil
}

func pciAddress(s string) (string, error) {
	a, err := pci.ParseAddress(s)
	return a.String(), err
}

// maxVFs is the maximum number of VFs of a PF in PCI Express.
const maxVFs = 65535

// The type pfRange is a PF with all or some of its VFs, such as ens1f0#0-3,7,9.
type pfRange struct {
	text, pf string
	spans    [][2]int // first and last VF; empty means the PF with all its VFs
}

// readRanges reads the values of pfNames and rootDevices.
func (r *reader) readRanges(v value, check func(string) (string, error)) []pfRange {
	var out []pfRange
	r.listOf(func(v value) {
		if !r.hasKind(v, text) {
			return
		}
		pf, spans, ranged := strings.Cut(v.text, "#")
		p := pfRange{text: v.text}
		var err error
		if p.pf, err = check(pf); err != nil {
			r.fail(v.Place, "%v", err)
		}
		for part := range strings.SplitSeq(spans, ",") {
			if !ranged {
				break
			}
			span, err := parseSpan(part)
			if err != nil {
				r.fail(v.Place, "%+.80q: %v", v.text, err)
				break
			}
			p.spans = append(p.spans, span)
		}
		out = append(out, p)
	})(v)
	return out
}

// parseSpan parses one VF or a range of VFs, such as 7 or 0-3.
func parseSpan(s string) (span [2]int, err error) {
	first, last, several := strings.Cut(s, "-")
	if !several {
		last = first
	}
	for i, digits := range []string{first, last} {
		n, err := strconv.ParseUint(digits, 10, 16)
		if err != nil {
			return span, fmt.Errorf("VFs %+.40q: want numbers up to %d after #, such as 0-3,7", s, maxVFs)
		}
		span[i] = int(n)
	}
	if span[0] > span[1] {
		return span, fmt.Errorf("VFs %s: want the smaller number first", s)
	}
	return span, nil
}

// contains() reports whether a device is in one of the ranges of VFs. A device that is not a VF has no index, and is therefore in no range
// of VFs.
func (p pfRange) contains(d subject) bool {
	return len(p.spans) == 0 || slices.ContainsFunc(p.spans, func(s [2]int) bool { return s[0] <= d.VFIndex && d.VFIndex <= s[1] })
}

// highestVF returns the highest VF number in the ranges, or -1 if there are no ranges.
func (p pfRange) highestVF() int {
	last := -1
	for _, s := range p.spans {
		last = max(last, s[1])
	}
	return last
}

func (r *reader) readAddresses(v value) addressTest {
	var out addressTest
	r.listOf(func(v value) {
		var a pci.Address
		if r.readAddress(&a)(v); a.IsValid() {
			out = append(out, a)
		}
	})(v)
	return out
}

func (r *reader) readNodes(v value) nodeTest {
	var out nodeTest
	r.listOf(func(v value) {
		if n, ok := r.readInteger(v, pci.Unknown, maxNode); ok {
			out = append(out, n)
		}
	})(v)
	return out
}

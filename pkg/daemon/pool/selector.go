// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/strict"
	"github.com/podlace/podlace/pkg/vfconfig"
)

var (
	idForm        = regexp.MustCompile(`^[0-9a-fA-F]{4}$`)
	linkForm      = regexp.MustCompile(`^(` + pci.Ether + `|` + pci.InfiniBand + `)$`)
	acpiIndexForm = regexp.MustCompile(`^[0-9]{1,10}$`)
)

func (r *reader) readSelectors(v strict.Value) []selector {
	if _, several := v.Data.(strict.List); !several {
		return []selector{r.readSelector(v)}
	}
	var out []selector
	r.Each(func(v strict.Value) { out = append(out, r.readSelector(v)) })(v)
	return out
}

// listOf reads a list and returns what convert makes of each item.
func listOf[J, T any](r *reader, v strict.Value, convert func(J) (T, error)) (out []T) {
	strict.ListTo(r.Report, &out, convert)(v)
	return out
}

func (r *reader) readSelector(v strict.Value) selector {
	s := selector{Place: v.Place}
	r.Object(v, r.selectorKeys(&s))
	return s
}

// selectorKeys returns the keys of a selector and the functions that read their values.
func (r *reader) selectorKeys(s *selector) strict.Fields {
	texts := func(check func(string) (string, error), get func(subject) string) func(strict.Value) {
		return func(v strict.Value) { s.add(v, textTest{listOf(r, v, check), get, nil}) }
	}
	fields := strict.Fields{
		"vendors": texts(hexID, func(d subject) string { return d.Vendor }),
		"devices": texts(hexID, func(d subject) string { return d.Product }),
		"drivers": func(v strict.Value) {
			names := listOf(r, v, driverName)
			if slices.Contains(names, "netdevice") {
				r.Note(v.Place, `"netdevice" is a kind of device and the name of no driver: write the driver that 'ethtool -i' shows, such as iavf`)
			}
			s.add(v, driverTest{textTest{names, func(d subject) string { return d.Driver }, nil}})
		},
		"pciAddresses": func(v strict.Value) {
			s.add(v, textTest{listOf(r, v, pciAddress), func(d subject) string { return d.Address.String() }, absentAddress})
		},
		"acpiIndexes": texts(acpiIndex, func(d subject) string { return d.ACPIIndex }),
		"pfNames":     func(v strict.Value) { s.add(v, pfTest{listOf(r, v, rangeOf(interfaceName)), "PF", pfName}) },
		"rootDevices": func(v strict.Value) { s.add(v, pfTest{listOf(r, v, rangeOf(pciAddress)), "root device", rootDevice}) },
		"linkTypes": func(v strict.Value) {
			types := listOf(r, v, linkType)
			r.noteInfiniBand(v, types)
			s.add(v, textTest{types, func(d subject) string { return d.LinkType }, nil})
		},
		"numaNodes": func(v strict.Value) {
			s.add(v, textTest{listOf(r, v, numaNode), func(d subject) string { return strconv.Itoa(d.NUMANode) }, absentNode})
		},
		"isRdma": func(v strict.Value) {
			if r.Bool(&s.RDMA)(v); s.RDMA {
				s.add(v, textTest{[]string{"true"}, func(d subject) string { return strconv.FormatBool(len(d.RDMA) > 0) }, nil})
			}
		},
		"needVhostNet": r.Bool(&s.VhostNet),
	}
	for _, key := range []string{"ddpProfiles", "pKeys", "vdpaType", "auxTypes", "nicNames"} {
		fields[key] = func(v strict.Value) { r.readUnsupported(v, key) }
	}
	return fields
}

// add adds a condition to the selector. An empty list of values adds no condition.
func (s *selector) add(v strict.Value, t test) {
	if list, ok := v.Data.(strict.List); !ok || len(list) > 0 {
		s.Conditions = append(s.Conditions, condition{v.Place, v.Name, t})
	}
}

// formed returns the text if it has the wanted form.
func formed(s string, form *regexp.Regexp, want string) (string, error) {
	if !form.MatchString(s) {
		return "", fmt.Errorf("%+.80q: want %s", s, want)
	}
	return s, nil
}

func hexID(s string) (string, error) {
	s, err := formed(s, idForm, "four hexadecimal digits, such as 8086")
	return strings.ToLower(s), err
}

func acpiIndex(s string) (string, error) {
	return formed(s, acpiIndexForm, `a number in quotes, such as "101"`)
}

func driverName(s string) (string, error) {
	return formed(s, driverForm, "the name of a driver, such as vfio-pci")
}

func linkType(s string) (string, error) { return formed(s, linkForm, pci.Ether+" or "+pci.InfiniBand) }

func numaNode(text json.Number) (string, error) {
	id, err := strict.Between(pci.Unknown, maxNode)(text)
	return strconv.Itoa(id), err
}

func pciAddress(s string) (string, error) {
	a, err := pci.ParseAddress(s)
	return a.String(), err
}

// maxVFs is the maximum number of VFs of a PF in PCI Express.
const maxVFs = 65535

// pfRange is a PF with all or some of its VFs, such as ens1f0#0-3,7,9.
type pfRange struct {
	text, pf string
	vfs      []vfconfig.Range // empty means the PF with all its VFs
}

// rangeOf returns a function that parses a value of pfNames or rootDevices.
func rangeOf(check func(string) (string, error)) func(string) (pfRange, error) {
	return func(text string) (p pfRange, err error) {
		pf, vfs, ranged := strings.Cut(text, "#")
		p.text = text
		if p.pf, err = check(pf); err != nil || !ranged {
			return p, err
		}
		p.vfs, err = vfconfig.ParseRanges(vfs, func(vf int) error {
			if vf < 0 || vf > maxVFs {
				return fmt.Errorf("want VFs up to %d", maxVFs)
			}
			return nil
		})
		if err != nil {
			err = fmt.Errorf("%+.80q: VFs after #: %w", text, err)
		}
		return p, err
	}
}

// contains reports whether a device is in one of the ranges of VFs, which only a VF can be.
func (p pfRange) contains(d subject) bool {
	return len(p.vfs) == 0 || slices.ContainsFunc(p.vfs, func(r vfconfig.Range) bool { return r.Has(d.VFIndex) })
}

// highestVF returns the highest VF number in the ranges, or -1 if there are no ranges.
func (p pfRange) highestVF() int {
	last := -1
	for _, r := range p.vfs {
		last = max(last, r.To)
	}
	return last
}

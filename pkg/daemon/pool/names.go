// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/strict"
)

var (
	nameForm   = regexp.MustCompile(`^[a-zA-Z0-9_-]+$`)
	edgeForm   = regexp.MustCompile(`^[a-zA-Z0-9](.*[a-zA-Z0-9])?$`)
	domainForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$`)
	driverForm = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)
	splitForm  = regexp.MustCompile(`^(.+)(_numa[0-9]+|_nonuma)$`)
)

// Limits for the names of extended resources. The names must be valid also with the prefix "requests.", which they have in a Kubernetes
// quota.
const (
	maxName   = 63
	maxPrefix = 253 - len("requests.")
	maxNode   = 1023 // largest ID of a NUMA node in the kernel
)

// noNUMA is the suffix of a resource whose devices have an unknown NUMA node while others of the same configuration entry have a known
// one.
const noNUMA = "_nonuma"

// numaSuffix returns the suffix of a resource's name for one NUMA node. Names stay valid with it: they may contain letters, digits,
// "-", "_" and ".", and end with a letter or digit.
func numaSuffix(node int) string { return fmt.Sprintf("_numa%d", node) }

func resourceName(s string) (string, error) {
	switch {
	case !nameForm.MatchString(s):
		return "", fmt.Errorf("%+.80q: want letters, digits, - and _", s)
	case !edgeForm.MatchString(s):
		return "", fmt.Errorf("%+.80q: want a letter or digit as first and last character", s)
	case len(s) > maxName:
		return "", fmt.Errorf("%+.80q: want at most %d characters", s, maxName)
	}
	return s, nil
}

func resourcePrefix(s string) (string, error) {
	switch {
	case !domainForm.MatchString(s) || len(s) > maxPrefix ||
		slices.ContainsFunc(strings.Split(s, "."), func(l string) bool { return len(l) > 63 }):
		return "", fmt.Errorf("%+.80q: want a DNS subdomain, such as intel.com", s)
	case strings.HasSuffix(s, "kubernetes.io") || strings.HasPrefix(s, "requests."):
		return "", fmt.Errorf("%+.80q: this prefix is reserved for Kubernetes", s)
	}
	return s, nil
}

// interfaceName checks the name of an interface. It also accepts alternative names, which may be longer than 15 bytes.
func interfaceName(s string) (string, error) {
	if s == "" || s == "." || s == ".." || len(s) > 127 ||
		strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c > '~' || strings.ContainsRune("/#:", c) }) {
		return "", fmt.Errorf("%+.80q: want the name of an interface, such as ens1f0", s)
	}
	return s, nil
}

func hostPattern(s string) (string, error) {
	if _, err := path.Match(s, ""); err != nil || s == "" {
		return "", fmt.Errorf("%+.80q: want a pattern for host names, such as worker-*", s)
	}
	return s, nil
}

// onHost reports whether an entry with these host patterns applies to a host. Without patterns, it applies to all.
func onHost(patterns []string, host string) bool {
	return len(patterns) == 0 || slices.ContainsFunc(patterns, func(p string) bool {
		ok, _ := path.Match(p, host)
		return ok
	})
}

// variableSuffix returns the end of the name of the resource's environment variable, after PCIDEVICE_.
func (r *Resource) variableSuffix() string {
	return strings.ToUpper(strings.ReplaceAll(cmp.Or(r.Prefix, "*")+"_"+r.Name, ".", "_"))
}

// maySplit reports whether a pool of the resource may have the given suffix in its name.
func (r *Resource) maySplit(ending string) bool {
	if r.API == DRA {
		return false
	}
	if ending == noNUMA {
		return r.UnknownNUMA == unknownOmit && !r.ExcludeTopology || r.SplitByNUMA && r.UnknownNUMA != unknownExclude
	}
	return r.SplitByNUMA
}

// checkNames reports an error for resources with the same name or the same environment variable.
func (r *reader) checkNames(resources []Resource) {
	variables := map[string]*Resource{}
	for i := range resources {
		res, variable := &resources[i], resources[i].variableSuffix()
		switch first := variables[variable]; {
		case res.Name == "": // already reported
		case first == nil:
			variables[variable] = res
		case first.FullName() == res.FullName():
			r.Fail(res.Place, "resource %s: %s in line %d has the same name", res.FullName(), first.Key, first.Line)
		default:
			r.Fail(res.Place, "resource %s: its environment variable PCIDEVICE_%s is also that of %s, %s in line %d; rename one",
				res.FullName(), variable, first.FullName(), first.Key, first.Line)
		}
	}
	for _, res := range resources {
		parts := splitForm.FindStringSubmatch(res.FullName())
		splits := func(o Resource) bool { return parts != nil && o.FullName() == parts[1] && o.maySplit(parts[2]) }
		if i := slices.IndexFunc(resources, splits); i >= 0 {
			r.Fail(res.Place, "resource %s: %s in line %d may offer devices under this name", res.FullName(), resources[i].Key, resources[i].Line)
		}
	}
}

// checkKeys reports a name that is too long for the suffix of a NUMA node, and selectors that require RDMA with a driver that does not
// support it.
func (r *reader) checkKeys(res *Resource, keys map[string]strict.Place) {
	if most := maxName - len(numaSuffix(maxNode)); res.SplitByNUMA && len(res.Name) > most {
		r.Fail(keys["resourceName"], "%+.80q: want at most %d characters with splitByNuma", res.Name, most)
	}
	for _, s := range res.Selectors {
		if s.RDMA && slices.Contains([]string{"vfio-pci", "uio_pci_generic", "igb_uio"}, res.Driver) {
			r.Fail(keys["driver"], "%s: devices bound to it have no RDMA, but %s.isRdma requires it", res.Driver, s.Key)
		}
	}
}

// checkPFs reports an error if two entries configure the same PF.
func (r *reader) checkPFs(pfs []pfEntry) {
	for i, pf := range pfs {
		for _, first := range pfs[:i] {
			if pf.Name == first.Name && pf.Address == first.Address && (pf.Name != "" || pf.Address.IsValid()) {
				r.Fail(pf.Place, "%s in line %d is for the same PF", first.Key, first.Line)
				break
			}
		}
	}
}
